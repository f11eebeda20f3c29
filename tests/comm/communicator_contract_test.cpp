// What every backend owes its callers, as data. Results are held against a scalar fold, bit for bit, so backends that
// pass agree with each other.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

#include "tests/comm/reference.h"

namespace fsdp {
namespace {

using reference::Bytes;

constexpr std::int64_t kLarge = std::int64_t{4} << 20;
constexpr std::int64_t kCounts[] = {0, 1, 4, 1000, 10007, kLarge};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kInt64};
constexpr DType kOtherDTypes[] = {DType::kFloat64, DType::kFloat16, DType::kInt32,
                                  DType::kInt16,   DType::kInt8,    DType::kUInt8};

class CommunicatorContractTest : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  int world_size() const { return std::get<1>(GetParam()); }
  void run(const std::function<void(Context)>& body) const {
    run_ranks(world_size(), body, {.backend = std::get<0>(GetParam())});
  }

  // Calls check(dtype, count) for the grid, and the rarer types at small counts. `shares` divides the largest count, where
  // a call moves so many times the count.
  void for_each_shape(int shares, const std::function<void(DType, std::int64_t)>& check) const {
    for (const std::int64_t count : kCounts) {
      for (const DType dtype : kDTypes) check(dtype, count == kLarge ? count / shares : count);
    }
    for (const DType dtype : kOtherDTypes) check(dtype, 1000);
  }

  std::vector<Bytes> inputs(DType dtype, std::int64_t numel) const {
    std::vector<Bytes> all;
    for (int rank = 0; rank < world_size(); ++rank) all.push_back(reference::elements(dtype, rank, numel));
    return all;
  }
};

Bytes concatenated(const std::vector<Bytes>& parts) {
  Bytes all;
  for (const Bytes& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Bytes part_of(const Bytes& whole, int index, std::size_t bytes) {
  const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(index) * bytes);
  return Bytes(begin, begin + static_cast<std::ptrdiff_t>(bytes));
}

std::size_t index_of(int rank) { return static_cast<std::size_t>(rank); }

std::string shape_name(DType dtype, std::int64_t count) {
  return std::string(name_of(dtype)) + " x " + std::to_string(count);
}

TEST_P(CommunicatorContractTest, AllGatherConcatenatesInRankOrder) {
  for_each_shape(world_size(), [&](DType dtype, std::int64_t count) {
    const auto parts = inputs(dtype, count);
    const Bytes expected = concatenated(parts);
    run([&](Context context) {
      const Bytes& input = parts[index_of(context.rank())];
      Bytes output(expected.size());
      context.communicator().all_gather(input, output);
      EXPECT_TRUE(output == expected) << shape_name(dtype, count);
    });
  });
}

TEST_P(CommunicatorContractTest, AllGatherWorksInPlace) {
  for_each_shape(world_size(), [&](DType dtype, std::int64_t count) {
    const auto parts = inputs(dtype, count);
    const Bytes expected = concatenated(parts);
    run([&](Context context) {
      const std::size_t bytes = parts[0].size();
      Bytes output(expected.size());
      const std::span<std::byte> own = std::span(output).subspan(index_of(context.rank()) * bytes, bytes);
      std::ranges::copy(parts[index_of(context.rank())], own.begin());
      context.communicator().all_gather(own, output);
      EXPECT_TRUE(output == expected) << shape_name(dtype, count);
    });
  });
}

TEST_P(CommunicatorContractTest, ReduceScatterSumsInRankOrder) {
  for_each_shape(world_size(), [&](DType dtype, std::int64_t count) {
    const auto all = inputs(dtype, count * world_size());
    const Bytes sums = reference::fold(dtype, ReduceOp::kSum, all);
    run([&](Context context) {
      Bytes output(sums.size() / index_of(world_size()));
      context.communicator().reduce_scatter(all[index_of(context.rank())].data(), output.data(), count, dtype);
      EXPECT_TRUE(output == part_of(sums, context.rank(), output.size())) << shape_name(dtype, count);
    });
  });
}

TEST_P(CommunicatorContractTest, AllReduceFoldsInRankOrder) {
  for_each_shape(1, [&](DType dtype, std::int64_t count) {
    const auto all = inputs(dtype, count);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      if (op != ReduceOp::kSum && count == kLarge) continue;  // the chunks are those of the sum
      const Bytes expected = reference::fold(dtype, op, all);
      run([&](Context context) {
        Bytes data = all[index_of(context.rank())];
        context.communicator().all_reduce(data.data(), count, dtype, op);
        EXPECT_TRUE(data == expected) << shape_name(dtype, count);
      });
    }
  });
}

TEST_P(CommunicatorContractTest, BroadcastCopiesTheRoots) {
  for_each_shape(1, [&](DType dtype, std::int64_t count) {
    const auto all = inputs(dtype, count);
    run([&](Context context) {
      for (const int root : {0, world_size() - 1}) {
        if (root == 0 && count == kLarge) continue;  // one root shows the chunks
        Bytes data = all[index_of(context.rank())];
        context.communicator().broadcast(data, root);
        EXPECT_TRUE(data == all[index_of(root)]) << shape_name(dtype, count) << " from " << root;
      }
    });
  });
}

TEST_P(CommunicatorContractTest, GatherReadsTheOwnersShards) {
  constexpr std::size_t kOffset = 24;
  for_each_shape(world_size(), [&](DType dtype, std::int64_t count) {
    const auto parts = inputs(dtype, count);
    const Bytes expected = concatenated(parts);
    run([&](Context context) {
      Communicator& communicator = context.communicator();
      const Bytes& own = parts[index_of(context.rank())];
      const auto segment = communicator.allocate(kOffset + own.size());
      std::ranges::copy(own, segment->local().begin() + kOffset);
      communicator.barrier();
      Bytes output(expected.size());
      communicator.gather({segment.get(), kOffset, own.size(), output.data(), "unit"});
      EXPECT_TRUE(output == expected) << shape_name(dtype, count);
      for (int first = 0; first < world_size(); ++first) {
        for (int ranks = 1; ranks <= world_size() - first; ++ranks) {
          Bytes some(index_of(ranks) * own.size());
          communicator.gather({segment.get(), kOffset, own.size(), some.data(), "unit", first, ranks});
          EXPECT_TRUE(std::ranges::equal(some, std::span(expected).subspan(index_of(first) * own.size(), some.size())))
              << shape_name(dtype, count) << " of " << ranks << " ranks from " << first;
        }
      }
      const int peer = (context.rank() + 1) % world_size();
      Bytes one(own.size());
      communicator.read(*segment, peer, kOffset, one);
      EXPECT_TRUE(one == parts[index_of(peer)]) << shape_name(dtype, count);
      communicator.barrier();
    });
  });
}

TEST_P(CommunicatorContractTest, ReduceSumsWhatLiesInTheSegments) {
  for_each_shape(world_size(), [&](DType dtype, std::int64_t count) {
    const auto all = inputs(dtype, count * world_size());
    const std::size_t share_bytes = all[0].size() / index_of(world_size());
    run([&](Context context) {
      Communicator& communicator = context.communicator();
      const auto segment = communicator.allocate(all[0].size());
      std::ranges::copy(all[index_of(context.rank())], segment->local().begin());
      communicator.barrier();
      std::vector<ReduceInput> places;
      std::vector<Bytes> shares;
      for (int peer = 0; peer < world_size(); ++peer) {
        places.push_back({segment.get(), index_of(context.rank()) * share_bytes});
        shares.push_back(part_of(all[index_of(peer)], context.rank(), share_bytes));
      }
      const Bytes assigned = reference::reduce(dtype, shares, count, world_size(), {});
      Bytes output(assigned.size());
      communicator.reduce(
          {.inputs = places, .numel = count, .input_dtype = dtype, .output = output.data(), .divisor = world_size()});
      EXPECT_TRUE(output == assigned) << shape_name(dtype, count);
      // The second rank has nothing to give, and the result is added to the first.
      places[index_of(1 % world_size())] = {};
      shares[index_of(1 % world_size())].clear();
      const Bytes accumulated = reference::reduce(dtype, shares, count, 1, assigned);
      communicator.reduce(
          {.inputs = places, .numel = count, .input_dtype = dtype, .output = output.data(), .accumulate = true});
      EXPECT_TRUE(output == accumulated) << shape_name(dtype, count);
      // What is this rank's own memory is taken from there.
      const Bytes own = part_of(all[index_of(context.rank())], context.rank(), share_bytes);
      places[0] = {.local = own.data()};
      shares[0] = own;
      const Bytes mixed = reference::reduce(dtype, shares, count, 1, {});
      communicator.reduce({.inputs = places, .numel = count, .input_dtype = dtype, .output = output.data()});
      EXPECT_TRUE(output == mixed) << shape_name(dtype, count);
      communicator.barrier();
    });
  });
}

TEST_P(CommunicatorContractTest, NobodyPassesABarrierBeforeTheLastCame) {
  std::atomic<int> came{0};
  run([&](Context context) {
    for (int round = 1; round <= 200; ++round) {
      came.fetch_add(1);
      context.communicator().barrier();
      EXPECT_GE(came.load(), round * world_size());
      context.communicator().barrier();
      EXPECT_LE(came.load(), round * world_size() + world_size());
    }
  });
}

TEST_P(CommunicatorContractTest, SegmentsAreZeroAlignedAndReadableByPeers) {
  run([&](Context context) {
    Communicator& communicator = context.communicator();
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, std::size_t{100'001}}) {
      const auto segment = communicator.allocate(bytes);
      ASSERT_EQ(segment->bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(segment->local().data()) % 4096, 0U);
      const auto expect_parts = [&](auto value_of) {
        for (int peer = 0; peer < world_size(); ++peer) {
          Bytes part(bytes);
          communicator.read(*segment, peer, 0, part);
          EXPECT_TRUE(std::ranges::all_of(part, [&](std::byte b) { return b == value_of(peer); }));
        }
      };
      expect_parts([](int) { return std::byte{}; });
      communicator.barrier();
      std::ranges::fill(segment->local(), static_cast<std::byte>(context.rank() + 1));
      communicator.barrier();
      expect_parts([](int peer) { return static_cast<std::byte>(peer + 1); });
    }
  });
}

TEST_P(CommunicatorContractTest, WaitUntilSeesAPeersWord) {
  run([&](Context context) {
    Communicator& communicator = context.communicator();
    const auto board = communicator.allocate_board(3);
    const int next = (context.rank() + 1) % world_size();
    for (std::uint64_t round = 1; round <= 200; ++round) {
      const std::uint64_t words[] = {round * 7, round};
      board->post(1, words);
      communicator.wait_until([&] { return board->word(next, 2) >= round; }, "the next rank's round");
      EXPECT_GE(board->word(next, 1), round * 7) << "posted before";
      EXPECT_EQ(board->word(next, 0), 0U);
    }
    communicator.barrier();
  });
}

// A word says that a peer's memory is ready: what the peer wrote before is what a reader then gets.
TEST_P(CommunicatorContractTest, AWordComesAfterWhatWasWrittenBeforeIt) {
  run([&](Context context) {
    Communicator& communicator = context.communicator();
    constexpr std::size_t kBytes = 3000;
    const auto segment = communicator.allocate(kBytes);
    const auto board = communicator.allocate_board(2);
    for (std::uint64_t round = 1; round <= 50; ++round) {
      std::ranges::fill(segment->local(), static_cast<std::byte>(round + index_of(context.rank())));
      board->post(0, round);
      for (int peer = 0; peer < world_size(); ++peer) {
        communicator.wait_until([&] { return board->word(peer, 0) == round; }, "a peer's memory");
        Bytes part(kBytes);
        communicator.read(*segment, peer, 0, part);
        EXPECT_TRUE(std::ranges::all_of(
            part, [&](std::byte b) { return b == static_cast<std::byte>(round + index_of(peer)); }));
      }
      board->post(1, round);
      communicator.wait_until(
          [&] {
            for (int peer = 0; peer < world_size(); ++peer) {
              if (board->word(peer, 1) < round) return false;
            }
            return true;
          },
          "all readers");
    }
  });
}

TEST_P(CommunicatorContractTest, MeanIsTheSameOnEveryRank) {
  run([&](Context context) {
    EXPECT_DOUBLE_EQ(context.mean(context.rank() + 1), (world_size() + 1) / 2.0);
    EXPECT_EQ(context.local_rank(), context.rank());
    EXPECT_EQ(context.local_world_size(), world_size());
  });
}

// One rank agrees with itself: these need two.
class CommunicatorAgreementTest : public CommunicatorContractTest {};

TEST_P(CommunicatorAgreementTest, AllocateOfDifferentSizesFailsOnEveryRankAndLeavesTheGroupUsable) {
  run([&](Context context) {
    Communicator& communicator = context.communicator();
    try {
      communicator.allocate(context.rank() == 1 ? 200 : 100);
      ADD_FAILURE() << "allocated";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("allocate of 100 bytes, rank 1 in allocate of 200 bytes"),
                std::string::npos)
          << error.what();
      EXPECT_EQ(error.rank(), 1);
    }
    EXPECT_EQ(communicator.allocate(64)->bytes(), 64U);
  });
}

TEST_P(CommunicatorContractTest, AllocateOfMoreThanThereIsFailsOnEveryRankAndLeavesTheGroupUsable) {
  run([&](Context context) {
    Communicator& communicator = context.communicator();
    for (const std::size_t bytes : {std::size_t{1} << 55, std::size_t{1} << 62}) {
      EXPECT_THROW(communicator.allocate(bytes), MemoryError);
    }
    EXPECT_EQ(communicator.allocate(64)->bytes(), 64U);
  });
}

TEST_P(CommunicatorAgreementTest, CallsThatDifferAreNamedOnEveryRank) {
  run([&](Context context) {
    float value = 1;
    try {
      if (context.rank() == world_size() - 1) {
        context.communicator().barrier();
      } else {
        context.communicator().all_reduce(reinterpret_cast<std::byte*>(&value), 1, DType::kFloat32, ReduceOp::kMax);
      }
      ADD_FAILURE() << "passed";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("all_reduce of 4 bytes (F32 max)"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("barrier"), std::string::npos) << error.what();
    }
  });
}

TEST_P(CommunicatorContractTest, OneSidedCallsRefuseRangesOutsideAShard) {
  run([&](Context context) {
    Communicator& communicator = context.communicator();
    const auto segment = communicator.allocate(100);
    Bytes output(index_of(world_size()) * 101);
    EXPECT_THROW(communicator.gather({segment.get(), 0, 101, output.data(), "unit"}), InvalidArgument);
    EXPECT_THROW(communicator.gather({segment.get(), 101, 0, output.data(), "unit"}), InvalidArgument);
    EXPECT_THROW(communicator.gather({nullptr, 0, 1, output.data(), "unit"}), InvalidArgument);
    EXPECT_THROW(communicator.gather({segment.get(), 0, 1, output.data(), "unit", 1, world_size()}), InvalidArgument);
    EXPECT_THROW(communicator.gather({segment.get(), 0, 1, output.data(), "unit", -1, 1}), InvalidArgument);
    EXPECT_THROW(communicator.read(*segment, world_size(), 0, output), InvalidArgument);
    EXPECT_THROW(communicator.reduce({.numel = 1, .output = output.data()}), InvalidArgument);
    EXPECT_THROW(communicator.broadcast(output, world_size()), InvalidArgument);
    EXPECT_THROW(communicator.all_gather(std::span(output).first(3), output), InvalidArgument);
  });
}

constexpr auto kInstanceName = [](const testing::TestParamInfo<std::tuple<std::string, int>>& instance) {
  return std::get<0>(instance.param) + std::to_string(std::get<1>(instance.param));
};

INSTANTIATE_TEST_SUITE_P(, CommunicatorContractTest,
                         testing::Combine(testing::Values("thread", "shm", "tcp"), testing::Values(1, 2, 3, 4, 5, 8)),
                         kInstanceName);
INSTANTIATE_TEST_SUITE_P(, CommunicatorAgreementTest,
                         testing::Combine(testing::Values("thread", "shm", "tcp"), testing::Values(2, 3, 4, 5, 8)),
                         kInstanceName);

}  // namespace
}  // namespace fsdp
