// Optimizers over this rank's flat shards: one fused pass, no step of which sees a full parameter.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/loss_scaler.h>

namespace fsdp {

// Overrides for the parameters that `matches` accepts; the first group that matches a parameter's dotted name wins.
// `ndim` is its number of dimensions (biases and norms have 1).
struct ParameterGroup {
  std::function<bool(const std::string& name, std::int64_t ndim)> matches{};
  std::optional<double> weight_decay{};
  double lr_scale = 1.0;  // times the optimizer's lr
};
using ParameterGroups = std::vector<ParameterGroup>;

// Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), bias-corrected as in torch::optim::AdamW.
struct AdamW {
  double lr = 1e-3;
  std::array<double, 2> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  ParameterGroups groups{};
};

// Adam (Kingma and Ba, arXiv:1412.6980), as torch::optim::Adam: weight decay is added to the gradient.
struct Adam {
  double lr = 1e-3;
  std::array<double, 2> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  ParameterGroups groups{};
};

// torch::optim::SGD without dampening: weight decay is added to the gradient.
struct SGD {
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
  ParameterGroups groups{};
};

// What step() does where a gradient is NaN or infinite on any rank; all ranks decide alike, before anything changes.
enum class OnNonFinite {
  kFail,  // throws Error (kNonFinite) on every rank, naming the first bad parameter
  kSkip,  // drops the gradients; StepResult::skipped
  kStop,  // as kSkip, and StepResult::stop: leave the loop and save, the model is that of the step before
};

struct StepOptions {
  // Gradients are scaled so that their norm over all parameters of all ranks is at most this, as
  // torch::nn::utils::clip_grad_norm_ does. Positive.
  std::optional<double> max_grad_norm{};
  double norm_type = 2;  // p of that norm and of StepResult::grad_norm: above 0, infinity included
  // Each element of the mean gradient is clamped to [-value, value], as clip_grad_value_ does. Positive; not together
  // with max_grad_norm.
  std::optional<double> max_grad_value{};
  OnNonFinite on_non_finite = OnNonFinite::kFail;
  LossScaler* scaler = nullptr;  // borrowed for the call
};

struct StepResult {
  double grad_norm = 0;  // before clipping and free of the loss's scale; the same bits on every rank
  bool skipped = false;
  bool stop = false;
  std::string first_bad_parameter{};  // empty where all were finite
};

class EngineState;

// Made by Engine::optimizer; the engine must outlive it. Not thread-safe.
class Optimizer {
 public:
  explicit Optimizer(EngineState& engine) : engine_(&engine) {}
  // Collective, the one point of a step that is alike on all ranks: finishes pending reductions, clips, updates the
  // shards, clears the gradients. Parameters that no rank used since the last step are left alone, decay included.
  // Throws CommunicationError, and InvalidArgument where a parameter's storage, hook or dispatch key is no longer the
  // engine's.
  StepResult step(const StepOptions& options = {});
  // Drops the gradients accumulated so far. Collective. torch::nn::Module::zero_grad works too, if every rank calls
  // it; unlike in plain LibTorch a parameter that is zeroed in place and gets no new gradient counts as unused: the
  // step leaves it alone.
  void zero_grad();
  void set_lr(double lr);
  double lr() const;

 private:
  EngineState* engine_;
};

}  // namespace fsdp
