// One rank's part of one tensor: what checkpoints are made of. No torch types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <fsdp/dtype.h>

namespace fsdp {

enum class ShardKind : std::uint8_t { kParameter, kGradient, kOptimizer };

// The elements [begin, end) of a tensor, counted in the order in which the tensor lies in memory. That order is
// row-major for `strides` of a contiguous tensor; for a dense transposed or channels-last one it follows `strides`:
//   shape {2, 3}, strides {3, 1}: memory order (0,0) (0,1) (0,2) (1,0) (1,1) (1,2)
//   shape {2, 3}, strides {1, 2}: memory order (0,0) (1,0) (0,1) (1,1) (0,2) (1,2)
// An empty range (begin == end) is legal: this rank holds nothing of the tensor. A 0-d tensor has shape {} and one
// element.
struct ShardView {
  std::string name;  // dotted parameter name; optimizer state is "exp_avg.<name>", ...
  ShardKind kind = ShardKind::kParameter;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;    // of the whole tensor
  std::vector<std::int64_t> strides;  // in elements; dense and non-overlapping
  std::int64_t begin = 0, end = 0;    // elements
  std::byte* data = nullptr;          // (end - begin) * size_of(dtype) bytes; borrowed from the engine
  int replica = 0;                    // which copy of the model this is a part of; every copy has the same bytes
};

}  // namespace fsdp
