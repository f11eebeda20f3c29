#include "sharding/mesh.h"

#include <gtest/gtest.h>

namespace fsdp {
namespace {

// The figure of NOTE [Mesh].
TEST(MeshTest, IsReplicasOfShares) {
  const int replica[] = {0, 0, 1, 1, 2, 2}, share[] = {0, 1, 0, 1, 0, 1};
  for (int rank = 0; rank < 6; ++rank) {
    const Mesh mesh{.world_size = 6, .rank = rank, .shares = 2};
    EXPECT_EQ(mesh.replicas(), 3);
    EXPECT_EQ(mesh.replica(), replica[rank]);
    EXPECT_EQ(mesh.share(), share[rank]);
    EXPECT_EQ(mesh.rank_of(replica[rank], share[rank]), rank);
  }
  const Mesh mesh{.world_size = 6, .rank = 1, .shares = 2};
  EXPECT_EQ(mesh.part_of_share(9, 0), (ElementRange{0, 3}));
  EXPECT_EQ(mesh.part_of_share(9, 1), (ElementRange{3, 3}));
  EXPECT_EQ(mesh.part_of_share(9, 2), (ElementRange{6, 3}));
}

TEST(MeshTest, PartsOfAShareLieSideBySideAndCoverIt) {
  for (int world_size = 1; world_size <= 8; ++world_size) {
    for (int shares = 1; shares <= world_size; ++shares) {
      if (world_size % shares != 0) continue;
      const Mesh mesh{.world_size = world_size, .rank = 0, .shares = shares};
      for (const std::int64_t numel : {0, 1, 5, 16, 1000003}) {
        std::int64_t next = 0;
        for (int replica = 0; replica < mesh.replicas(); ++replica) {
          const ElementRange part = mesh.part_of_share(numel, replica);
          EXPECT_EQ(part.offset, next);
          next += part.numel;
        }
        EXPECT_EQ(next, numel);
      }
    }
  }
}

}  // namespace
}  // namespace fsdp
