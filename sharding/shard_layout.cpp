#include "sharding/shard_layout.h"

#include <algorithm>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

ShardLayout::ShardLayout(const std::vector<std::int64_t>& parameter_numels, std::size_t element_bytes, int world_size)
    : world_size_(world_size) {
  if (world_size < 1)
    throw InvalidArgument(fmt::format("shard layout: expected a world size of at least 1, got {}", world_size));
  if (element_bytes == 0 || kParameterAlignmentBytes % element_bytes != 0) {
    throw InvalidArgument(fmt::format("shard layout: expected an element size that divides {} bytes, got {}",
                                      kParameterAlignmentBytes, element_bytes));
  }
  const auto alignment = static_cast<std::int64_t>(kParameterAlignmentBytes / element_bytes);
  std::int64_t end = 0;
  for (const std::int64_t numel : parameter_numels) {
    if (numel < 0) throw InvalidArgument(fmt::format("shard layout: expected a numel of at least 0, got {}", numel));
    const std::int64_t offset = round_up(end, alignment);
    if (offset > end) gaps_.push_back({end, offset - end});
    parameters_.push_back({offset, numel});
    end = offset + numel;
  }
  // A group without elements still has storage: views over zero bytes throw.
  shard_numel_ = round_up((std::max<std::int64_t>(end, 1) + world_size - 1) / world_size, alignment);
  if (numel() > end) gaps_.push_back({end, numel() - end});
}

ShardPiece ShardLayout::piece(std::size_t parameter, int rank) const {
  const ElementRange& range = parameters_.at(parameter);
  const std::int64_t shard_begin = rank * shard_numel_;
  const std::int64_t begin = std::clamp(shard_begin - range.offset, std::int64_t{0}, range.numel);
  const std::int64_t end = std::clamp(shard_begin + shard_numel_ - range.offset, std::int64_t{0}, range.numel);
  if (begin >= end) return {begin, begin, 0};
  return {begin, end, range.offset + begin - shard_begin};
}

}  // namespace fsdp
