#include "tests/checkpoint/model_shard.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "checkpoint/reshard_plan.h"

namespace fsdp {
namespace {

constexpr std::byte kClear{0xee};

std::vector<std::byte> expected_bytes(const ShardView& view) {
  const std::vector<std::int64_t> indices = logical_indices(view.shape, view.strides);
  std::vector<std::byte> bytes;
  for (std::int64_t i = view.begin; i < view.end; ++i) {
    for (std::size_t byte = 0; byte < size_of(view.dtype); ++byte) {
      bytes.push_back(test_byte(view.name, indices[static_cast<std::size_t>(i)], byte));
    }
  }
  return bytes;
}

}  // namespace

std::vector<ModelTensor> test_model() {
  std::vector<ModelTensor> tensors = {
      {"embed.weight", ShardKind::kParameter, DType::kFloat32, {11, 6}, {6, 1}},
      {"norm.bias", ShardKind::kParameter, DType::kBFloat16, {7}, {1}},
      {"norm.scale", ShardKind::kParameter, DType::kFloat32, {}, {}},
      {"unused", ShardKind::kParameter, DType::kFloat32, {0, 3}, {3, 1}},
      {"conv.weight", ShardKind::kParameter, DType::kFloat32, {3, 4, 2, 3}, {24, 1, 12, 4}},
      {"proj.weight", ShardKind::kParameter, DType::kFloat64, {5, 3}, {1, 5}},
  };
  const std::size_t floats = tensors.size();
  tensors.push_back({"norm.batches", ShardKind::kParameter, DType::kInt64, {}, {}});
  for (std::size_t i = 0; i < floats; ++i) {
    for (const char* state : {"exp_avg.", "exp_avg_sq."}) {
      tensors.push_back(tensors[i]);
      tensors.back().name = state + tensors[i].name;
      tensors.back().kind = ShardKind::kOptimizer;
    }
  }
  return tensors;
}

std::byte test_byte(const std::string& name, std::int64_t index, std::size_t byte) {
  const std::size_t mixed = std::hash<std::string>()(name) + static_cast<std::size_t>(index) * 0x9e3779b97f4a7c15U +
                            byte * 0xbf58476d1ce4e5b9U;
  return static_cast<std::byte>((mixed ^ (mixed >> 29)) * 0x94d049bb133111ebU >> 56);
}

std::vector<std::byte> test_bytes(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape) {
  std::vector<std::byte> bytes;
  for (std::int64_t i = 0; i < numel_of(shape); ++i) {
    for (std::size_t byte = 0; byte < size_of(dtype); ++byte) bytes.push_back(test_byte(name, i, byte));
  }
  return bytes;
}

std::vector<std::int64_t> logical_indices(const std::vector<std::int64_t>& shape,
                                          const std::vector<std::int64_t>& strides) {
  const std::int64_t numel = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  std::vector<std::int64_t> indices(static_cast<std::size_t>(numel));
  for (std::int64_t index = 0; index < numel; ++index) {
    std::int64_t rest = index, position = 0;
    for (std::size_t d = shape.size(); d-- > 0; rest /= shape[d]) position += rest % shape[d] * strides[d];
    indices[static_cast<std::size_t>(position)] = index;
  }
  return indices;
}

ModelShard::ModelShard(std::vector<ModelTensor> tensors, int rank, int world_size) : tensors_(std::move(tensors)) {
  std::map<ShardKind, std::int64_t> totals, firsts;
  for (const ModelTensor& tensor : tensors_) totals[tensor.kind] += numel_of(tensor.shape);
  for (const ModelTensor& tensor : tensors_) {
    const std::int64_t numel = numel_of(tensor.shape), part = (totals[tensor.kind] + world_size - 1) / world_size;
    std::int64_t& first = firsts[tensor.kind];
    const std::int64_t begin = std::clamp<std::int64_t>(rank * part - first, 0, numel),
                       end = std::clamp<std::int64_t>((rank + 1) * part - first, 0, numel);
    first += numel;
    bytes_.emplace_back(static_cast<std::size_t>(end - begin) * size_of(tensor.dtype), kClear);
    views_.push_back(
        {tensor.name, tensor.kind, tensor.dtype, tensor.shape, tensor.strides, begin, end, bytes_.back().data()});
  }
}

void ModelShard::fill() {
  for (std::size_t i = 0; i < views_.size(); ++i) std::ranges::copy(expected_bytes(views_[i]), bytes_[i].begin());
}

void ModelShard::clear() {
  for (auto& bytes : bytes_) std::ranges::fill(bytes, kClear);
}

bool ModelShard::is_filled() const {
  for (std::size_t i = 0; i < views_.size(); ++i) {
    if (bytes_[i] != expected_bytes(views_[i])) return false;
  }
  return true;
}

bool ModelShard::is_clear() const {
  return std::ranges::all_of(
      bytes_, [](const auto& bytes) { return std::ranges::all_of(bytes, [](std::byte b) { return b == kClear; }); });
}

CheckpointContent ModelShard::content(std::int64_t step) const {
  return {.step = step,
          .views = views_,
          .tied = {{"head.weight", "embed.weight"}},
          .scalars = {{"optimizer_step.embed.weight", step}, {"offset", -3}},
          .rank_state = {}};
}

}  // namespace fsdp
