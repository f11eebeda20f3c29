#include "sharding/communication_stream.h"

#include <atomic>
#include <mutex>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

namespace fsdp {
namespace {

void wait_idle(Communicator& communicator, const CommunicationStream& stream) {
  communicator.wait_until([&] { return stream.is_idle(); }, "the stream");
}

TEST(CommunicationStreamTest, RunsReadyJobsInOrderAndLetsThemPassOneThatWaits) {
  run_ranks(1, [](const Context& context) {
    Communicator& communicator = context.communicator();
    std::atomic<bool> open{false};
    std::vector<int> order;
    CommunicationStream stream(communicator, [] {});
    stream.enqueue({[&] { return open.load(); }, [&] { order.push_back(0); }, "the first"});
    std::atomic<int> done{0};
    for (int job = 1; job <= 3; ++job) {
      stream.enqueue({[] { return true; },
                      [&order, &done, &communicator, job] {
                        order.push_back(job);
                        ++done;
                        communicator.ring();
                      },
                      "another"});
    }
    communicator.wait_until([&] { return done == 3; }, "the others");
    EXPECT_FALSE(stream.is_idle());
    open = true;
    communicator.ring();
    wait_idle(communicator, stream);
    EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 0}));
  });
}

TEST(CommunicationStreamTest, KeepsTheFirstFailureAndAbortsTheGroupWithItsText) {
  run_ranks(1, [](const Context& context) {
    CommunicationStream stream(context.communicator(), [] {});
    stream.enqueue({[] { return true; }, [] { throw DeviceError("the wire is cut"); }, "gather of layers.3"});
    while (!stream.is_idle()) std::this_thread::yield();
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
