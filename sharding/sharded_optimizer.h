// Adam, AdamW or SGD over this rank's shards: state buffers, per-parameter settings, and the one pass of a step.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <fsdp/optimizer.h>
#include <fsdp/shard_view.h>

#include "sharding/engine_core.h"

namespace fsdp {

using OptimizerOptions = std::variant<AdamW, Adam, SGD>;

class ShardedOptimizer {
 public:
  // Throws InvalidArgument for values out of range, naming field and value.
  ShardedOptimizer(EngineCore& core, OptimizerOptions options);

  // Collective. The p-norm of the gradients of the used parameters over all ranks, and the first of them that is not
  // finite.
  struct Norm {
    double value = 0;
    int first_bad = -1;  // parameter index, -1 = none
  };
  Norm gradient_norm(const std::vector<bool>& used, double p) const;
  // Steps the used parameters' shards.
  void update(const std::vector<bool>& used, const GradientUse& gradient);

  void set_lr(double lr);
  double lr() const { return lr_; }
  std::size_t state_bytes() const;
  std::vector<std::string> state_names() const;  // "exp_avg", ...
  std::byte* state(std::size_t which, const FlatGroup& group) const;
  std::vector<std::int64_t>& parameter_steps() { return steps_; }  // updates made of each parameter

 private:
  struct Setting {
    double lr_scale = 1, weight_decay = 0;
  };
  OptimizerSpan span_of(const ShardedParameter& p) const;
  void resolve_settings(double weight_decay, const ParameterGroups& groups);

  EngineCore& core_;
  OptimizerOptions options_;
  double lr_ = 0;
  std::vector<at::Tensor> states_;  // bytes, laid out as the gradient buffer
  std::vector<Setting> settings_;   // by parameter
  std::vector<std::int64_t> steps_;
};

}  // namespace fsdp
