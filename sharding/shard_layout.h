// Where the parameters of one group lie in its flat buffer, and which part of it each rank owns. Integers only.
//
// NOTE [Flat layout]
// Each parameter starts at a multiple of 64 bytes; the buffer is cut into world_size equal shards, each a multiple of
// 64 bytes. Offsets in elements. fp32 (16 elements in 64 bytes), parameters of 20, 0, 3 and 16 elements, 2 ranks:
//
//   flat    0        20   32   35  48       64
//           | p0     | .. | p2 |.. | p3     |          numel 64, p1 has no elements and sits at 32
//   shard   | rank 0      | rank 1          |          shard_numel 32
//
// The dotted parts are gaps: they hold zeros in parameters, gradients and optimizer state alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp {

// A run of elements: [offset, offset + numel).
struct ElementRange {
  std::int64_t offset = 0, numel = 0;
  bool operator==(const ElementRange&) const = default;
};

// The part of a parameter that one rank owns: elements [begin, end) of the parameter, at shard_offset of the rank's
// shard.
struct ShardPiece {
  std::int64_t begin = 0, end = 0, shard_offset = 0;
  std::int64_t numel() const { return end - begin; }
  bool operator==(const ShardPiece&) const = default;
};

// Immutable; throws InvalidArgument for a negative numel, an element size that does not divide 64, or world_size < 1.
class ShardLayout {
 public:
  ShardLayout(const std::vector<std::int64_t>& parameter_numels, std::size_t element_bytes, int world_size);

  std::int64_t numel() const { return shard_numel_ * world_size_; }
  std::int64_t shard_numel() const { return shard_numel_; }
  const std::vector<ElementRange>& parameters() const { return parameters_; }
  const std::vector<ElementRange>& gaps() const { return gaps_; }
  ShardPiece piece(std::size_t parameter, int rank) const;

 private:
  int world_size_;
  std::int64_t shard_numel_ = 0;
  std::vector<ElementRange> parameters_, gaps_;
};

constexpr std::size_t kParameterAlignmentBytes = 64;

}  // namespace fsdp
