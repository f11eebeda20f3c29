// Dynamic loss scaling for fp16 gradients, which lose what is below 6e-8.
#pragma once

#include <cstdint>

namespace at {
class Tensor;
}

namespace fsdp {

// The defaults are those of torch.amp.GradScaler.
struct LossScalerOptions {
  double initial_scale = 65536;
  double growth_factor = 2;     // after growth_interval finite steps in a row; at least 1
  double backoff_factor = 0.5;  // after a step whose gradients were not finite; in (0, 1)
  std::int64_t growth_interval = 2000;
};

// One per engine and rank. Call `scale(loss).backward()`, then Optimizer::step({.scaler = &scaler}): the step divides
// gradients, norm and clipping by the scale within its one pass, is skipped where a gradient is not finite on any rank
// (whatever StepOptions::on_non_finite says, until the scale is below 1), and adapts the scale alike on all ranks.
// Ranks must start from the same options. Not thread-safe.
class LossScaler {
 public:
  // Throws InvalidArgument for values out of range.
  explicit LossScaler(const LossScalerOptions& options = {});

  // loss * scale(), in the loss's own type.
  at::Tensor scale(const at::Tensor& loss) const;
  double scale() const { return scale_; }
  // Finite steps since the scale last changed; with scale() all that a checkpoint needs.
  std::int64_t finite_steps() const { return finite_steps_; }
  void restore(double scale, std::int64_t finite_steps);

  // What Optimizer::step tells it.
  void update(bool finite);

 private:
  LossScalerOptions options_;
  double scale_;
  std::int64_t finite_steps_ = 0;
};

}  // namespace fsdp
