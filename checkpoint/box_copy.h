// Copies a box of elements between two memory layouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <fsdp/shard_view.h>

#include "checkpoint/reshard_plan.h"

namespace fsdp {

// Where a box lies: element (i, j, ...) of the box is at data + (i * strides[0] + j * strides[1] + ...) *
// element_bytes.
struct ConstBlock {
  const std::byte* data = nullptr;
  std::span<const std::int64_t> strides;
};
struct Block {
  std::byte* data = nullptr;
  std::span<const std::int64_t> strides;
};

// REQUIRES strides of sizes.size() entries, blocks that do not overlap.
void copy_box(std::span<const std::int64_t> sizes, ConstBlock source, Block target, std::size_t element_bytes);

// Where the box's first element lies in the view's data. REQUIRES a box inside the view's range.
std::byte* first_byte(const ShardView& view, const Box& box);

// One box of a view -> `bytes`, row-major. REQUIRES a box inside the view's range, bytes.size() == its size.
void pack_box(const ShardView& view, const Box& box, std::span<std::byte> bytes);

// The part `region` of the row-major block `saved` that holds `extent` -> the view. REQUIRES region inside extent and
// the view's range.
void unpack_region(const Box& region, const Box& extent, std::span<const std::byte> saved, const ShardView& view);

}  // namespace fsdp
