// The exponential moving average of the trainable weights, sharded as they are.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/optimizer.h>
#include <fsdp/shard_view.h>

#include "sharding/engine_core.h"

namespace fsdp {

class WeightAverage {
 public:
  // Starts from the present weights. Throws InvalidArgument for a decay out of range, and by name for a trainable
  // parameter that is kept in 16 bits only.
  WeightAverage(EngineCore& core, const Ema& options);

  // Elements [begin, begin + numel) of this rank's piece of a trainable parameter.
  void update(const ShardedParameter& p, std::int64_t begin, std::int64_t numel);
  // Exchanges averages and weights.
  void swap();

  double decay() const { return decay_; }
  std::size_t bytes() const { return averages_.nbytes(); }
  std::byte* shard(const FlatGroup& group) const {
    return static_cast<std::byte*>(averages_.mutable_data_ptr()) + group.state_offset;
  }

 private:
  EngineCore& core_;
  double decay_;
  at::Tensor averages_;  // laid out as each optimizer state
};

}  // namespace fsdp
