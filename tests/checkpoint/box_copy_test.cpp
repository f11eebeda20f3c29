#include "checkpoint/box_copy.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/model_shard.h"

namespace fsdp {
namespace {

// Each range of each tensor goes through its boxes, packed as in a file, and comes back bit-equal.
TEST(BoxCopyTest, ReturnsEveryRangeOfEveryLayoutThroughPackedBoxes) {
  for (const ModelTensor& tensor : test_model()) {
    for (int world = 1; world <= 5; ++world) {
      for (int rank = 0; rank < world; ++rank) {
        ModelShard source({tensor}, rank, world), target({tensor}, rank, world);
        source.fill();
        const ShardView &from = source.views()[0], &to = target.views()[0];
        for (const Box& box : boxes_of({from.shape, from.strides, from.begin, from.end})) {
          std::vector<std::byte> packed(static_cast<std::size_t>(numel_of(box.sizes)) * size_of(from.dtype));
          pack_box(from, box, packed);
          unpack_region(box, box, packed, to);
        }
        ASSERT_TRUE(target.is_filled()) << tensor.name << " rank " << rank << " of " << world;
      }
    }
  }
}

TEST(BoxCopyTest, PacksATransposedBoxRowMajor) {
  const ModelTensor tensor{"t", ShardKind::kParameter, DType::kInt16, {4, 3}, {1, 4}};
  ModelShard shard({tensor}, 0, 1);
  shard.fill();
  std::vector<std::byte> packed(24);
  pack_box(shard.views()[0], {{0, 0}, {4, 3}}, packed);
  EXPECT_EQ(packed, test_bytes("t", DType::kInt16, {4, 3}));
}

TEST(BoxCopyTest, CopiesOnlyTheRegion) {
  const ModelTensor tensor{"t", ShardKind::kParameter, DType::kUInt8, {4, 4}, {4, 1}};
  ModelShard shard({tensor}, 0, 1);
  const std::vector<std::byte> saved(9, std::byte{1});
  unpack_region({{1, 1}, {2, 2}}, {{1, 1}, {3, 3}}, saved, shard.views()[0]);
  for (std::int64_t i = 0; i < 16; ++i) {
    const bool inside = i / 4 >= 1 && i / 4 <= 2 && i % 4 >= 1 && i % 4 <= 2;
    EXPECT_EQ(shard.views()[0].data[i], inside ? std::byte{1} : std::byte{0xee}) << i;
  }
}

}  // namespace
}  // namespace fsdp
