#include "checkpoint/reshard_plan.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

// Cuts a row-major range into boxes from the slowest dimension down: a partial first row, whole rows, a partial last
// row. The two partial rows are ranges of the dimensions below, and touch one of their ends; so each level adds at most
// two boxes.
class RangeCutter {
 public:
  explicit RangeCutter(std::vector<std::int64_t> shape)
      : shape_(std::move(shape)), row_(row_major_strides(shape_)), prefix_(shape_.size(), 0) {}

  std::vector<Box> cut(std::int64_t begin, std::int64_t end) {
    if (begin == end) return {};
    if (shape_.empty()) return {Box{}};
    cut_level(0, begin, end);
    return std::move(boxes_);
  }

 private:
  void cut_level(std::size_t level, std::int64_t begin, std::int64_t end) {
    const std::int64_t row = row_[level];
    std::int64_t first = begin / row;
    const std::int64_t last = end / row;
    if (begin % row != 0) {
      const std::int64_t row_end = std::min(end - first * row, row);
      cut_row(level, first, begin % row, row_end);
      ++first;
    }
    if (first < last) add_rows(level, first, last - first);
    if (first <= last && end % row != 0) cut_row(level, last, 0, end % row);
  }

  void cut_row(std::size_t level, std::int64_t index, std::int64_t begin, std::int64_t end) {
    prefix_[level] = index;
    cut_level(level + 1, begin, end);
    prefix_[level] = 0;
  }

  void add_rows(std::size_t level, std::int64_t first, std::int64_t count) {
    Box box{prefix_, shape_};
    std::fill_n(box.sizes.begin(), level, 1);
    box.offsets[level] = first;
    box.sizes[level] = count;
    boxes_.push_back(std::move(box));
  }

  std::vector<std::int64_t> shape_, row_, prefix_;
  std::vector<Box> boxes_;
};

Box to_logical(const Box& box, std::span<const std::size_t> order) {
  Box logical{std::vector<std::int64_t>(order.size()), std::vector<std::int64_t>(order.size())};
  for (std::size_t i = 0; i < order.size(); ++i) {
    logical.offsets[order[i]] = box.offsets[i];
    logical.sizes[order[i]] = box.sizes[i];
  }
  return logical;
}

}  // namespace

std::optional<std::int64_t> checked_numel(std::span<const std::int64_t> sizes) {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) return std::nullopt;
  }
  return product;
}

std::int64_t numel_of(std::span<const std::int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<std::int64_t> row_major_strides(std::span<const std::int64_t> shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

std::optional<std::vector<std::size_t>> memory_order(std::span<const std::int64_t> shape,
                                                     std::span<const std::int64_t> strides) {
  const auto numel = checked_numel(shape);
  if (shape.size() != strides.size() || !numel) return std::nullopt;
  std::vector<std::size_t> order(shape.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (*numel == 0) return order;
  // The stride of a dimension of size 1 means nothing; such dimensions go first, where they cost no box.
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if ((shape[a] == 1) != (shape[b] == 1)) return shape[a] == 1;
    return shape[a] != 1 && strides[a] > strides[b];
  });
  std::int64_t expected = 1;
  for (std::size_t i = order.size(); i-- > 0 && shape[order[i]] != 1;) {
    if (strides[order[i]] != expected) return std::nullopt;
    expected *= shape[order[i]];
  }
  return order;
}

bool is_row_major(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  if (shape.size() != strides.size()) return false;
  std::int64_t expected = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::vector<Box> boxes_of(const FlatRange& range) {
  const auto order = memory_order(range.shape, range.strides);
  if (!order) {
    throw InvalidArgument(fmt::format(
        "strides {} of shape {} are not dense and non-overlapping: expected those of a contiguous or permuted tensor",
        range.strides, range.shape));
  }
  const std::int64_t numel = numel_of(range.shape);
  if (range.begin < 0 || range.begin > range.end || range.end > numel) {
    throw InvalidArgument(fmt::format("range [{}, {}) does not lie in [0, {}), the elements of shape {}", range.begin,
                                      range.end, numel, range.shape));
  }
  std::vector<std::int64_t> permuted;
  for (const std::size_t dimension : *order) permuted.push_back(range.shape[dimension]);
  std::vector<Box> boxes = RangeCutter(std::move(permuted)).cut(range.begin, range.end);
  for (Box& box : boxes) box = to_logical(box, *order);
  return boxes;
}

std::vector<Box> boxes_main_first(const FlatRange& range) {
  std::vector<Box> boxes = boxes_of(range);
  const auto main = std::max_element(boxes.begin(), boxes.end(),
                                     [](const Box& a, const Box& b) { return numel_of(a.sizes) < numel_of(b.sizes); });
  if (main != boxes.end()) std::rotate(boxes.begin(), main, main + 1);
  return boxes;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box common;
  for (std::size_t i = 0; i < a.offsets.size(); ++i) {
    const std::int64_t begin = std::max(a.offsets[i], b.offsets[i]);
    const std::int64_t end = std::min(a.offsets[i] + a.sizes[i], b.offsets[i] + b.sizes[i]);
    if (begin >= end) return std::nullopt;
    common.offsets.push_back(begin);
    common.sizes.push_back(end - begin);
  }
  return common;
}

}  // namespace fsdp
