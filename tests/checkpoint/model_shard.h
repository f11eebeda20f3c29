// One rank's shards of a model that has every kind of tensor a checkpoint must carry, with values that can be checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <fsdp/checkpoint.h>
#include <fsdp/shard_view.h>

namespace fsdp {

struct ModelTensor {
  std::string name;
  ShardKind kind = ShardKind::kParameter;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape, strides;
};

// Matrix, odd bf16 vector, 0-d float and integer, zero-element, channels-last and transposed tensors, with Adam state
// of each float one.
std::vector<ModelTensor> test_model();

// The byte of element `index` (row-major) of a tensor: depends on the name and the logical place, not on the layout in
// memory.
std::byte test_byte(const std::string& name, std::int64_t index, std::size_t byte);
// All bytes of a tensor, row-major.
std::vector<std::byte> test_bytes(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape);

// Row-major index of each element in memory order, found by walking over all coordinates.
std::vector<std::int64_t> logical_indices(const std::vector<std::int64_t>& shape,
                                          const std::vector<std::int64_t>& strides);

class ModelShard {
 public:
  // Cuts the tensors of each kind, laid end to end, into equal parts: cuts fall into rows, and many ranges are empty.
  ModelShard(std::vector<ModelTensor> tensors, int rank, int world_size);
  ModelShard(int rank, int world_size) : ModelShard(test_model(), rank, world_size) {}

  const std::vector<ShardView>& views() const { return views_; }
  std::vector<ShardView>& views() { return views_; }
  void fill();   // with test_byte
  void clear();  // with 0xee
  bool is_filled() const;
  bool is_clear() const;
  CheckpointContent content(std::int64_t step) const;

 private:
  std::vector<ModelTensor> tensors_;
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<ShardView> views_;
};

}  // namespace fsdp
