// A save with each of its calls failing in turn: all ranks must hear the same, and nothing that was there before may be
// lost.
#include "checkpoint/commit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

#include "checkpoint/load.h"
#include "checkpoint/step_directory.h"
#include "tests/checkpoint/faulty_file_system.h"
#include "tests/checkpoint/model_shard.h"
#include "tests/support/temp_dir.h"

namespace fsdp {
namespace {

struct CallFault {
  int world_size = 1;
  int rank = 0;  // whose call fails
  int call = 0;  // which one
  bool persistent = false;
  int error = EIO;
};

// Saves `step` with the fault; the message of every rank, "" for success. `calls` is how many the faulty rank made.
std::vector<std::string> save_with(const CallFault& fault, const std::filesystem::path& dir, std::int64_t step,
                                   std::size_t* calls = nullptr) {
  std::vector<std::string> messages(static_cast<std::size_t>(fault.world_size));
  run_ranks(fault.world_size, [&](Context context) {
    FaultyFileSystem system;
    if (context.rank() == fault.rank) {
      system.fail_at = fault.call;
      system.persistent = fault.persistent;
      system.error = fault.error;
    }
    ModelShard shard(context.rank(), fault.world_size);
    shard.fill();
    try {
      save_checkpoint(context.communicator(), system, dir, shard.content(step));
    } catch (const CheckpointError& error) {
      messages[static_cast<std::size_t>(context.rank())] = error.what();
    }
    if (calls && context.rank() == fault.rank) *calls = system.calls.size();
  });
  return messages;
}

std::int64_t loaded_step(int world_size, const std::filesystem::path& dir) {
  std::int64_t step = -1;
  run_ranks(world_size, [&](Context context) {
    ModelShard shard(context.rank(), world_size);
    const auto loaded = load_checkpoint(context.communicator(), dir, shard.views());
    ASSERT_TRUE(loaded);
    EXPECT_TRUE(shard.is_filled());
    if (context.is_main()) step = loaded->step;
  });
  return step;
}

struct Case {
  int world_size, rank;
  bool persistent, same_step;
};

class CommitFaultTest : public testing::TestWithParam<Case> {};

TEST_P(CommitFaultTest, KeepsTheStepBeforeAndTheNextSaveWorks) {
  const auto [world_size, rank, persistent, same_step] = GetParam();
  const std::int64_t step = same_step ? 1 : 2;
  std::size_t reported = 0;
  for (int call = 0;; ++call) {
    const TempDir dir;
    ASSERT_EQ(save_with({world_size, 0, -1}, dir.path(), 1).front(), "");
    std::size_t calls = 0;
    const auto messages = save_with({world_size, rank, call, persistent}, dir.path(), step, &calls);
    for (const std::string& message : messages) EXPECT_EQ(message, messages.front()) << "call " << call;
    if (!messages.front().empty()) {
      ++reported;
      EXPECT_THAT(messages.front(), testing::AllOf(testing::HasSubstr("failed on rank " + std::to_string(rank)),
                                                   testing::HasSubstr("Input/output error")));
    }
    // Either the old state or the new one, whole: an error after the rename leaves the new step.
    const std::int64_t found = loaded_step(world_size, dir.path());
    EXPECT_TRUE(found == step || (!messages.front().empty() && found == 1)) << "call " << call << " step " << found;
    ASSERT_EQ(save_with({world_size, 0, -1}, dir.path(), 3).front(), "") << "call " << call;
    EXPECT_EQ(loaded_step(world_size, dir.path()), 3);
    for (const auto& entry : std::filesystem::directory_iterator(dir.path())) {
      EXPECT_FALSE(is_temporary(entry.path().filename().string())) << entry.path();
    }
    if (static_cast<std::size_t>(call) >= calls) break;
  }
  // Unheard may only go what does not matter: the close of a file that was read, the unlink of a directory.
  EXPECT_GT(reported, 20U);
}

INSTANTIATE_TEST_SUITE_P(Calls, CommitFaultTest,
                         testing::Values(Case{1, 0, false, false}, Case{1, 0, true, false}, Case{1, 0, false, true},
                                         Case{2, 0, false, false}, Case{2, 1, false, false}, Case{2, 1, true, true}),
                         [](const auto& test) {
                           return "World" + std::to_string(test.param.world_size) + "Rank" +
                                  std::to_string(test.param.rank) + (test.param.persistent ? "Persistent" : "Once") +
                                  (test.param.same_step ? "SameStep" : "NextStep");
                         });

TEST(CommitFaultTest, TellsAFullDiskOnEveryRank) {
  const TempDir dir;
  const auto messages = save_with({.world_size = 4, .rank = 2, .call = 1, .persistent = false, .error = ENOSPC},
                                  dir.path(), 1);
  for (const std::string& message : messages) {
    EXPECT_EQ(message, messages.front());
    EXPECT_THAT(message,
                testing::AllOf(testing::HasSubstr("failed on rank 2: reserve space for "),
                               testing::HasSubstr("shard-00003-model-00001-of-"),
                               testing::HasSubstr("No space left on device ("), testing::HasSubstr("make room")));
  }
}

TEST(CommitFaultTest, SavesThroughInterruptsAndShortWrites) {
  const TempDir dir;
  run_ranks(2, [&](Context context) {
    FaultyFileSystem system;
    system.stutter = true;
    ModelShard shard(context.rank(), 2);
    shard.fill();
    save_checkpoint(context.communicator(), system, dir.path(), shard.content(4));
    shard.clear();
    ASSERT_TRUE(load_checkpoint(context.communicator(), system, dir.path(), shard.views()));
    EXPECT_TRUE(shard.is_filled());
  });
}

}  // namespace
}  // namespace fsdp
