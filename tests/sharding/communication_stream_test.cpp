#include "sharding/communication_stream.h"

#include <atomic>
#include <future>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

namespace fsdp {
namespace {

TEST(CommunicationStreamTest, RunsReadyJobsInOrderAndLetsThemPassOneThatWaits) {
  run_ranks(1, [](const Context& context) {
    Communicator& communicator = context.communicator();
    std::atomic<bool> open{false};
    std::vector<int> order;
    std::atomic<int> done{0};
    CommunicationStream stream(communicator, [] {});
    for (int job = 0; job <= 3; ++job) {
      stream.enqueue({[&open, job] { return job > 0 || open.load(); },
                      [&order, &done, &communicator, job] {
                        order.push_back(job);
                        ++done;
                        communicator.ring();
                      },
                      "a job"});
    }
    communicator.wait_until([&] { return done == 3; }, "the jobs that are ready");
    open = true;
    communicator.ring();
    communicator.wait_until([&] { return done == 4; }, "the job that waited");
    EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 0}));
  });
}

TEST(CommunicationStreamTest, KeepsTheFirstFailureAndAbortsTheGroupWithItsText) {
  run_ranks(1, [](const Context& context) {
    std::promise<void> failed;
    CommunicationStream stream(context.communicator(), [&] { failed.set_value(); });
    stream.enqueue({[] { return true; }, [] { throw DeviceError("the wire is cut"); }, "gather of layers.3"});
    failed.get_future().wait();
    EXPECT_THROW(stream.check(), DeviceError);
    try {
      context.communicator().check();
      FAIL() << "the group was not aborted";
    } catch (const CommunicationError& error) {
      EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("gather of layers.3"),
                                                 ::testing::HasSubstr("the wire is cut")));
    }
  });
}

TEST(CommunicationStreamTest, EndsWithJobsThatNeverBecomeReady) {
  run_ranks(1, [](const Context& context) {
    CommunicationStream stream(context.communicator(), [] {});
    stream.enqueue({[] { return false; }, [] { FAIL(); }, "never"});
  });
}

}  // namespace
}  // namespace fsdp
