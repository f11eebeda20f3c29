// LibTorch's own element-wise optimizers, and a user's, over this rank's shards.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

namespace fsdp {

// This rank's part of one trainable parameter: flat, possibly empty, in the type the parameter had before fsdp::shard.
// Its .grad is the mean gradient, defined in each step that some rank has used the parameter in.
struct ParameterShard {
  std::string name;  // dotted
  at::Tensor tensor;
};

// An optimizer whose update of an element depends on that element alone: LibTorch's Adam, AdamW, SGD, RMSprop and
// Adagrad; LBFGS is refused by name. Clipping, loss scales and weights are applied to the gradient shards before its
// step(), in place. Slower than the fused AdamW, Adam and SGD: several passes over memory. Parameters of 16 bits need
// fp32 masters (ShardOptions::precision).
struct TorchOptimizer {
  // Called once, by Engine::optimizer; the optimizer may hold the tensors in any parameter groups.
  std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<ParameterShard>& shards)> make{};
  // For an optimizer that is not LibTorch's: the state that belongs to a shard, tensors of its numel that stay where
  // they are from `make` on. Names are what checkpoints call them. Left empty, Engine::save throws for such an
  // optimizer.
  std::function<std::vector<std::pair<std::string, at::Tensor>>(torch::optim::Optimizer&, const ParameterShard&)>
      state{};
};

// torch_optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3)): one group of all shards.
template <class Optimizer, class Options>
TorchOptimizer torch_optimizer(Options options) {
  return {.make = [options](const std::vector<ParameterShard>& shards) -> std::unique_ptr<torch::optim::Optimizer> {
            std::vector<at::Tensor> tensors;
            for (const ParameterShard& shard : shards) tensors.push_back(shard.tensor);
            return std::make_unique<Optimizer>(std::move(tensors), options);
          },
          .state = {}};
}

}  // namespace fsdp
