#include "sharding/shard_layout.h"

#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

// The map of NOTE [Flat layout].
TEST(ShardLayoutTest, MatchesTheMapInItsHeader) {
  const ShardLayout layout({20, 0, 3, 16}, 4, 2);
  EXPECT_EQ(layout.numel(), 64);
  EXPECT_EQ(layout.shard_numel(), 32);
  EXPECT_EQ(layout.parameters(), (std::vector<ElementRange>{{0, 20}, {32, 0}, {32, 3}, {48, 16}}));
  EXPECT_EQ(layout.gaps(), (std::vector<ElementRange>{{20, 12}, {35, 13}}));
  EXPECT_EQ(layout.piece(0, 0), (ShardPiece{0, 20, 0}));
  EXPECT_EQ(layout.piece(0, 1).numel(), 0);
  EXPECT_EQ(layout.piece(2, 1), (ShardPiece{0, 3, 0}));
  EXPECT_EQ(layout.piece(3, 1), (ShardPiece{0, 16, 16}));
}

TEST(ShardLayoutTest, PadsTheLastRankWhenNumelIsUneven) {
  const ShardLayout layout({100}, 4, 3);
  EXPECT_EQ(layout.shard_numel(), 48);
  EXPECT_EQ(layout.numel(), 144);
  EXPECT_EQ(layout.gaps(), (std::vector<ElementRange>{{100, 44}}));
  EXPECT_EQ(layout.piece(0, 2), (ShardPiece{96, 100, 0}));
}

TEST(ShardLayoutTest, GivesStorageToAGroupWithoutElements) {
  const ShardLayout layout({0, 0}, 8, 4);
  EXPECT_GT(layout.numel(), 0);
  EXPECT_EQ(layout.piece(1, 3).numel(), 0);
}

TEST(ShardLayoutTest, CoversEveryElementOnceForEveryWorldSize) {
  const std::vector<std::int64_t> numels{1, 0, 17, 1000, 64, 3, 10007};
  for (const std::size_t element_bytes : {1UL, 2UL, 4UL, 8UL}) {
    for (int world_size = 1; world_size <= 8; ++world_size) {
      const ShardLayout layout(numels, element_bytes, world_size);
      EXPECT_EQ(layout.numel(), layout.shard_numel() * world_size);
      EXPECT_EQ(layout.shard_numel() * static_cast<std::int64_t>(element_bytes) % 64, 0);
      for (std::size_t p = 0; p < numels.size(); ++p) {
        EXPECT_EQ(layout.parameters()[p].offset * static_cast<std::int64_t>(element_bytes) % 64, 0);
        std::int64_t next = 0;
        for (int rank = 0; rank < world_size; ++rank) {
          const ShardPiece piece = layout.piece(p, rank);
          if (piece.numel() == 0) continue;
          EXPECT_EQ(piece.begin, next);
          EXPECT_EQ(rank * layout.shard_numel() + piece.shard_offset, layout.parameters()[p].offset + piece.begin);
          next = piece.end;
        }
        EXPECT_EQ(next, numels[p]);
      }
      // Parameters and gaps tile the flat buffer.
      std::int64_t covered = 0;
      for (const ElementRange& range : layout.parameters()) covered += range.numel;
      for (const ElementRange& range : layout.gaps()) covered += range.numel;
      EXPECT_EQ(covered, layout.numel());
    }
  }
}

TEST(ShardLayoutTest, RefusesWhatCannotBeLaidOut) {
  EXPECT_THROW(ShardLayout({-1}, 4, 1), InvalidArgument);
  EXPECT_THROW(ShardLayout({1}, 3, 1), InvalidArgument);
  EXPECT_THROW(ShardLayout({1}, 4, 0), InvalidArgument);
}

}  // namespace
}  // namespace fsdp
