// Which ranks share one copy of the model, and which hold the same share of it. Integers only.
//
// NOTE [Mesh]
// W ranks are R replicas of S ranks: rank = replica * S + share. The ranks of a replica hold one copy of the model
// between them; the R owners of a share hold the same bytes. A gradient is the mean over all W ranks in rank order. Of
// a share's elements each owner sums its part and then copies the others' parts. W = 6, S = 2:
//
//   rank       0  1  2  3  4  5        share of 9 elements, owned by ranks 1, 3 and 5:
//   replica    0  0  1  1  2  2          rank 1 sums [0, 3)
//   share      0  1  0  1  0  1          rank 3 sums [3, 6)
//                                        rank 5 sums [6, 9)
//
// S = W is full sharding, S = 1 pure replication; neither is a path of its own.
#pragma once

#include <cstdint>

#include "sharding/shard_layout.h"

namespace fsdp {

// REQUIRES shares divides world_size.
struct Mesh {
  int world_size = 1;
  int rank = 0;
  int shares = 1;  // S

  int replicas() const { return world_size / shares; }
  int replica() const { return rank / shares; }
  int share() const { return rank % shares; }
  int rank_of(int replica, int share) const { return replica * shares + share; }
  // The elements of its share that the owner in `replica` sums.
  ElementRange part_of_share(std::int64_t shard_numel, int replica) const {
    const std::int64_t begin = shard_numel * replica / replicas();
    return {begin, shard_numel * (replica + 1) / replicas() - begin};
  }
};

}  // namespace fsdp
