#include "checkpoint/box_copy.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace fsdp {
namespace {

struct Dimension {
  std::int64_t size, source_stride, target_stride;  // strides in bytes
};

// Slowest target dimension first, and neighbours that both sides step through as one are one: most boxes become a
// single memcpy.
std::vector<Dimension> coalesced(std::span<const std::int64_t> sizes, ConstBlock source, Block target,
                                 std::int64_t element_bytes) {
  std::vector<Dimension> dimensions;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) {
      dimensions.push_back({sizes[i], source.strides[i] * element_bytes, target.strides[i] * element_bytes});
    }
  }
  std::stable_sort(dimensions.begin(), dimensions.end(),
                   [](const Dimension& a, const Dimension& b) { return a.target_stride > b.target_stride; });
  std::vector<Dimension> merged;
  for (const Dimension& inner : dimensions) {
    if (!merged.empty() && merged.back().source_stride == inner.source_stride * inner.size &&
        merged.back().target_stride == inner.target_stride * inner.size) {
      merged.back() = {merged.back().size * inner.size, inner.source_stride, inner.target_stride};
    } else {
      merged.push_back(inner);
    }
  }
  return merged;
}

// kElementBytes as a constant turns the inner memcpy into one load and one store.
template <std::size_t kElementBytes>
void copy_dimensions(std::span<const Dimension> dimensions, const std::byte* source, std::byte* target) {
  if (dimensions.empty()) {
    std::memcpy(target, source, kElementBytes);
    return;
  }
  const Dimension& outer = dimensions.front();
  constexpr auto kStep = static_cast<std::int64_t>(kElementBytes);
  if (dimensions.size() == 1 && outer.source_stride == kStep && outer.target_stride == kStep) {
    std::memcpy(target, source, static_cast<std::size_t>(outer.size) * kElementBytes);
    return;
  }
  for (std::int64_t i = 0; i < outer.size; ++i) {
    copy_dimensions<kElementBytes>(dimensions.subspan(1), source + i * outer.source_stride,
                                   target + i * outer.target_stride);
  }
}

}  // namespace

std::byte* first_byte(const ShardView& view, const Box& box) {
  std::int64_t element = -view.begin;
  for (std::size_t i = 0; i < box.offsets.size(); ++i) element += box.offsets[i] * view.strides[i];
  return view.data + element * static_cast<std::int64_t>(size_of(view.dtype));
}

void copy_box(std::span<const std::int64_t> sizes, ConstBlock source, Block target, std::size_t element_bytes) {
  if (numel_of(sizes) == 0) return;
  const std::vector<Dimension> dimensions = coalesced(sizes, source, target, static_cast<std::int64_t>(element_bytes));
  switch (element_bytes) {
    case 1: return copy_dimensions<1>(dimensions, source.data, target.data);
    case 2: return copy_dimensions<2>(dimensions, source.data, target.data);
    case 4: return copy_dimensions<4>(dimensions, source.data, target.data);
    default: return copy_dimensions<8>(dimensions, source.data, target.data);
  }
}

void pack_box(const ShardView& view, const Box& box, std::span<std::byte> bytes) {
  const std::vector<std::int64_t> packed = row_major_strides(box.sizes);
  copy_box(box.sizes, {first_byte(view, box), view.strides}, {bytes.data(), packed}, size_of(view.dtype));
}

void unpack_region(const Box& region, const Box& extent, std::span<const std::byte> saved, const ShardView& view) {
  const std::vector<std::int64_t> packed = row_major_strides(extent.sizes);
  std::int64_t first = 0;
  for (std::size_t i = 0; i < packed.size(); ++i) first += (region.offsets[i] - extent.offsets[i]) * packed[i];
  const std::size_t element_bytes = size_of(view.dtype);
  copy_box(region.sizes, {saved.data() + first * static_cast<std::int64_t>(element_bytes), packed},
           {first_byte(view, region), view.strides}, element_bytes);
}

}  // namespace fsdp
