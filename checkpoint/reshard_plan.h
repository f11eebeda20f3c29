// Which boxes a flat range of a tensor is, and which part of a saved box a wanted range needs. Integers only.
//
//   shape {4, 6}, range [4, 21):      . . . . a a      three boxes, in memory order:
//                                     b b b b b b        a  offsets {0, 4}  sizes {1, 2}   crumb
//                                     b b b b b b        b  offsets {1, 0}  sizes {2, 6}   main box
//                                     c c c . . .        c  offsets {3, 0}  sizes {1, 3}   crumb
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace fsdp {

// A box of a tensor in logical coordinates. Of a 0-d tensor: no offsets, no sizes, one element.
struct Box {
  std::vector<std::int64_t> offsets, sizes;
  bool operator==(const Box&) const = default;
};

// Product of the sizes; nullopt where it does not fit in 63 bits.
std::optional<std::int64_t> checked_numel(std::span<const std::int64_t> sizes);
// REQUIRES a product that fits.
std::int64_t numel_of(std::span<const std::int64_t> sizes);

std::vector<std::int64_t> row_major_strides(std::span<const std::int64_t> shape);

// The dimensions from slowest to fastest as they lie in memory; nullopt where `strides` is not dense and
// non-overlapping.
std::optional<std::vector<std::size_t>> memory_order(std::span<const std::int64_t> shape,
                                                     std::span<const std::int64_t> strides);

// Whether the memory order of the elements is the row-major one.
bool is_row_major(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides);

// Elements of a tensor, counted in memory order (see ShardView).
struct FlatRange {
  std::vector<std::int64_t> shape, strides;
  std::int64_t begin = 0, end = 0;
};

// The range as at most 2n-1 disjoint boxes in memory order; none for an empty range. Throws InvalidArgument for strides
// that are not dense, or a range outside the tensor.
std::vector<Box> boxes_of(const FlatRange& range);

// The same with the largest box first: what goes to file 1, 2, ... of a rank. The first of equals counts as the
// largest.
std::vector<Box> boxes_main_first(const FlatRange& range);

// nullopt where the boxes have no element in common. REQUIRES the same number of dimensions.
std::optional<Box> intersect(const Box& a, const Box& b);

}  // namespace fsdp
