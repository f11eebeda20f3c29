#include "sharding/reduce_mailbox.h"

#include <atomic>
#include <thread>

#include <gtest/gtest.h>

#include <fsdp/testing.h>

namespace fsdp {
namespace {

Mesh full_shard(const Context& context) {
  return {.world_size = context.world_size(), .rank = context.rank(), .shares = context.world_size()};
}

TEST(ReduceMailboxTest, IsReducibleWhenAllHavePublishedAndDrainedWhenAllHaveRead) {
  run_ranks(3, [](const Context& context) {
    const Mesh mesh = full_shard(context);
    ReduceMailbox mailbox(context.communicator(), {mesh, mesh}, 3);
    for (std::uint64_t generation = 1; generation <= 10; ++generation) {
      const auto location = generation * 100 + static_cast<std::uint64_t>(context.rank());
      mailbox.publish(1, generation, location);
      context.communicator().wait_until([&] { return mailbox.is_reducible(1, generation); }, "publication");
      EXPECT_FALSE(mailbox.is_reducible(0, generation));
      for (int rank = 0; rank < 3; ++rank)
        EXPECT_EQ(mailbox.location(rank, 1, generation), generation * 100 + static_cast<std::uint64_t>(rank));
      context.communicator().barrier();
      EXPECT_FALSE(mailbox.is_drained(1, generation));
      context.communicator().barrier();
      mailbox.consume(1, generation);
      mailbox.complete(1, generation);
      context.communicator().wait_until([&] { return mailbox.is_drained(1, generation); }, "draining");
    }
    context.communicator().barrier();
  });
}

// Two replicas of two shares. Ranks 0 and 2 own share 0: each copies when both have summed, and reduces the next
// generation when both have copied, whatever the owners of share 1 do.
TEST(ReduceMailboxTest, OwnersOfAShareWaitForEachOtherTwice) {
  run_ranks(4, [](const Context& context) {
    const Mesh mesh{.world_size = 4, .rank = context.rank(), .shares = 2};
    ReduceMailbox mailbox(context.communicator(), {mesh}, 3);
    Communicator& communicator = context.communicator();
    const bool owns_share_0 = mesh.share() == 0;
    for (const std::uint64_t generation : {1, 2}) mailbox.publish(0, generation, 0);
    communicator.barrier();
    EXPECT_TRUE(mailbox.is_reducible(0, 1));
    EXPECT_FALSE(mailbox.is_reducible(0, 2));
    communicator.barrier();
    if (context.rank() == 0) mailbox.consume(0, 1);
    communicator.barrier();
    EXPECT_FALSE(mailbox.is_summed(0, 1));
    communicator.barrier();
    if (context.rank() == 2) mailbox.consume(0, 1);
    communicator.barrier();
    EXPECT_EQ(mailbox.is_summed(0, 1), owns_share_0);
    EXPECT_FALSE(mailbox.is_drained(0, 1)) << "the owners of share 1 still read";
    if (owns_share_0) mailbox.complete(0, 1);
    communicator.barrier();
    EXPECT_EQ(mailbox.is_reducible(0, 2), owns_share_0);
    EXPECT_FALSE(mailbox.is_settled(0, 1));
    communicator.barrier();
    if (!owns_share_0) mailbox.consume(0, 1);
    communicator.barrier();
    EXPECT_TRUE(mailbox.is_drained(0, 1));
    EXPECT_EQ(mailbox.is_settled(0, 1), owns_share_0);
  });
}

// Rank 0 has published unit 0 and waits for its slot, rank 1 unit 1: each lacks the other's.
TEST(ReduceMailboxTest, FindsACircleOfRanksThatWaitForEachOther) {
  std::atomic<int> waiting{0}, looked{0};  // not the communicator: a rank in a collective is seen as waiting too
  const auto until = [](const std::atomic<int>& count, int target) {
    while (count < target) std::this_thread::yield();
  };
  run_ranks(3, [&](const Context& context) {
    const Mesh mesh = full_shard(context);
    ReduceMailbox mailbox(context.communicator(), {mesh, mesh}, 3);
    ReduceMailbox::Drain awaited;
    EXPECT_FALSE(mailbox.is_deadlocked());
    if (context.rank() < 2) {
      mailbox.publish(context.rank(), 1, 0);
      mailbox.wait_for(awaited, {context.rank(), 1});
    }
    ++waiting;
    until(waiting, 3);
    // Rank 2 still runs and could publish both; but rank 0 needs rank 1 to go on, and the other way round.
    EXPECT_EQ(mailbox.is_deadlocked(), context.rank() < 2);
    ++looked;
    until(looked, 3);
    if (context.rank() == 1) mailbox.wait_for(awaited, {});
    ++waiting;
    until(waiting, 6);
    EXPECT_FALSE(mailbox.is_deadlocked());
    ++looked;
    until(looked, 6);
  });
}

// The circle above, while another thread of each rank begins and ends a wait that is none.
TEST(ReduceMailboxTest, AWaitOutlivesThoseOfOtherThreads) {
  run_ranks(2, [](const Context& context) {
    const Mesh mesh = full_shard(context);
    ReduceMailbox mailbox(context.communicator(), {mesh, mesh, mesh}, 3);
    mailbox.publish(context.rank(), 1, 0);
    mailbox.publish(2, 1, 0);
    ReduceMailbox::Drain of_one, of_other;
    mailbox.wait_for(of_one, {context.rank(), 1});
    mailbox.wait_for(of_other, {2, 1});
    mailbox.wait_for(of_other, {});
    context.communicator().barrier();
    EXPECT_TRUE(mailbox.is_deadlocked());
    context.communicator().barrier();
    mailbox.wait_for(of_one, {});
    context.communicator().barrier();
    EXPECT_FALSE(mailbox.is_deadlocked());
    context.communicator().barrier();
  });
}

TEST(ReduceMailboxTest, AWaitForPublishedGradientsIsNoCircle) {
  run_ranks(2, [](const Context& context) {
    const Mesh mesh = full_shard(context);
    ReduceMailbox mailbox(context.communicator(), {mesh}, 3);
    mailbox.publish(0, 1, 0);
    ReduceMailbox::Drain awaited;
    mailbox.wait_for(awaited, {0, 1});  // published by both: the reductions end on their own
    context.communicator().barrier();
    EXPECT_FALSE(mailbox.is_deadlocked());
    context.communicator().barrier();
  });
}

// Rank 0 is in a collective of the user's (a mean of the losses) before it has published what rank 1 needs.
TEST(ReduceMailboxTest, AWaitForARankThatIsGoneIsWithoutEndUnlessItHasRead) {
  run_ranks(2, [](const Context& context) {
    const Mesh mesh = full_shard(context);
    ReduceMailbox mailbox(context.communicator(), {mesh, mesh}, 3);
    for (const int unit : {0, 1}) mailbox.publish(unit, 1, 0);
    mailbox.consume(0, 1);
    if (context.rank() == 1) mailbox.set_gone();
    context.communicator().barrier();
    if (context.rank() == 0) {
      ReduceMailbox::Drain awaited;
      EXPECT_FALSE(mailbox.is_deadlocked());
      mailbox.wait_for(awaited, {0, 1});
      EXPECT_FALSE(mailbox.is_deadlocked());
      mailbox.wait_for(awaited, {1, 1});
      EXPECT_TRUE(mailbox.is_deadlocked());
    }
    context.communicator().barrier();
  });
}

TEST(ReduceMailboxTest, ARankInACollectiveThatThisOneHasNotReachedIsPartOfACircle) {
  run_ranks(2, [](const Context& context) {
    const Mesh mesh = full_shard(context);
    ReduceMailbox mailbox(context.communicator(), {mesh}, 3);
    if (context.rank() == 1) {
      mailbox.publish(0, 1, 0);
      ReduceMailbox::Drain awaited;
      mailbox.wait_for(awaited, {0, 1});
      context.communicator().wait_until([&] { return mailbox.is_deadlocked(); }, "rank 0's collective");
      mailbox.wait_for(awaited, {});
    }
    EXPECT_EQ(context.mean(context.rank()), 0.5);
    EXPECT_FALSE(mailbox.is_deadlocked());
  });
}

}  // namespace
}  // namespace fsdp
