// LibTorch's optimizers, or a user's, over tensors that are this rank's shares.
#pragma once

#include "sharding/sharded_optimizer.h"

namespace fsdp {

class ShardTensorOptimizer final : public ShardedOptimizer {
 public:
  ShardTensorOptimizer(EngineCore& core, TorchOptimizer options);

  void visit_settings(const SettingVisitor& visit) override;
  void set_lr(double lr) override;
  double lr() const override { return lr_; }
  std::size_t state_bytes() const override;
  std::size_t unsharded_state_bytes() const override;
  void append_views(std::vector<ShardView>& views) const override;
  std::int64_t steps_of(std::size_t parameter) const override;
  void set_steps_of(std::size_t parameter, std::int64_t steps) override;

 private:
  using StateTensors = std::vector<std::pair<std::string, at::Tensor>>;
  void prepare(std::span<const int> parameters, const std::vector<bool>& used, const StepSettings& settings) override;
  void update_run(std::size_t parameter, std::int64_t begin, std::int64_t numel) override;
  void describe_rest(std::vector<std::string>& lines) const override;
  void make_states();
  bool states_are_known() const;
  StateTensors states_of(std::size_t shard) const;

  TorchOptimizer options_;
  std::vector<ParameterShard> shards_;   // of the trainable parameters
  std::vector<at::Tensor> gradients_;    // beside shards_
  std::vector<std::size_t> parameters_;  // beside shards_: index into the model's
  std::vector<int> shard_of_;            // by parameter, -1 = frozen
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  double lr_ = 0;
  double made_lr_ = 0;             // the largest of the groups, as the user made them; lr_ moves them all in proportion
  std::vector<double> group_lrs_;  // as the user made them
  std::vector<std::int64_t> steps_;  // updates of each shard; LibTorch's SGD counts none
};

}  // namespace fsdp
