#include "sharding/weight_average.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {

WeightAverage::WeightAverage(EngineCore& core, const Ema& options)
    : core_(core), decay_(options.decay), averages_(zeroed_bytes(core.model.state_bytes)) {
  if (!(decay_ >= 0 && decay_ < 1))
    throw InvalidArgument(fmt::format("Engine::keep_ema: expected decay in [0, 1), got {}", decay_));
  for (const FlatGroup& group : core_.model.groups) {
    if (!group.trainable) continue;
    if (group.master_dtype != group.gradient_dtype()) {
      const ShardedParameter& first = core_.model.parameters[static_cast<std::size_t>(group.parameters.front())];
      throw InvalidArgument(
          fmt::format("Engine::keep_ema: parameter {} is kept in {} only, too coarse for an average; "
                      "leave it fp32 and set ShardOptions::precision.param",
                      first.name, name_of(group.master_dtype)));
    }
    std::memcpy(shard(group), core_.master_shard(group), bytes_of(group.layout->shard_numel(), group.master_dtype));
  }
}

void WeightAverage::update(const ShardedParameter& p, std::int64_t begin, std::int64_t numel) {
  const FlatGroup& group = core_.model.group_of(p);
  const std::size_t offset = bytes_of(p.piece.shard_offset + begin, group.master_dtype);
  average_update(shard(group) + offset, core_.master_shard(group) + offset, numel, group.master_dtype, decay_);
}

void WeightAverage::swap() {
  for (const FlatGroup& group : core_.model.groups) {
    if (!group.trainable) continue;
    std::byte* weights = core_.master_shard(group);
    std::swap_ranges(weights, weights + bytes_of(group.layout->shard_numel(), group.master_dtype), shard(group));
    core_.refresh_parameters(group);
  }
}

}  // namespace fsdp
