// AdamW, Adam and SGD: state beside this rank's shares and one pass over each.
#pragma once

#include <functional>
#include <variant>

#include "sharding/sharded_optimizer.h"

namespace fsdp {

class FusedOptimizer final : public ShardedOptimizer {
 public:
  using Options = std::variant<AdamW, Adam, SGD>;
  // `covers` tells for which trainable parameters there is to be state; empty = all.
  FusedOptimizer(EngineCore& core, Options options, const std::function<bool(const ShardedParameter&)>& covers = {});

  void visit_settings(const SettingVisitor& visit) override;
  void set_lr(double lr) override;
  double lr() const override { return lr_; }
  std::size_t state_bytes() const override;
  std::size_t unsharded_state_bytes() const override;
  void append_views(std::vector<ShardView>& views) const override;
  std::int64_t steps_of(std::size_t parameter) const override { return slots_[parameter].steps; }
  void set_steps_of(std::size_t parameter, std::int64_t steps) override { slots_[parameter].steps = steps; }

  void prepare(std::span<const int> parameters, const std::vector<bool>& used, const StepSettings& settings) override;
  void update_run(std::size_t parameter, std::int64_t begin, std::int64_t numel) override;
  void describe_rest(std::vector<std::string>& lines) const override;

 private:
  // What belongs to one parameter.
  struct Slot {
    bool covered = false;
    double lr_scale = 1, weight_decay = 0;
    std::int64_t steps = 0;
    std::size_t state_offset = 0;  // bytes, in each state
  };
  // Checks the options and works out what each parameter has of them.
  void apply_options();
  void resolve_groups(double weight_decay, const ParameterGroups& groups);
  std::byte* state(std::size_t which, std::size_t parameter) const;

  Options options_;
  double lr_ = 0;
  StepSettings settings_;
  std::vector<Slot> slots_;         // by parameter
  std::vector<at::Tensor> states_;  // bytes: the pieces of covered parameters side by side
};

}  // namespace fsdp
