// How waits end when a peer fails: on every backend, on every rank, with a name.
#include <array>
#include <atomic>
#include <chrono>
#include <ctime>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::Not;

// Far above the 50 ms of the contract, far below a timeout.
constexpr auto kSoon = 2s;

struct Waiting {
  std::string name;
  std::function<void(Communicator&)> call;
};

std::vector<Waiting> all_waits() {
  static std::array<std::byte, 64> scratch;  // never written: the call fails
  return {
      {"allocate", [](Communicator& c) { c.allocate(16); }},
      {"all_gather", [](Communicator& c) { c.all_gather({}, {}); }},
      {"reduce_scatter", [](Communicator& c) { c.reduce_scatter(nullptr, nullptr, 0, DType::kFloat32); }},
      {"all_reduce", [](Communicator& c) { c.all_reduce(scratch.data(), 0, DType::kFloat32, ReduceOp::kSum); }},
      {"broadcast", [](Communicator& c) { c.broadcast({}, 0); }},
      {"barrier", [](Communicator& c) { c.barrier(); }},
      {"gradients of layers.3", [](Communicator& c) { c.wait_until([] { return false; }, "gradients of layers.3"); }},
  };
}

// Runs `call`, which must throw a CommunicationError soon, and gives its text.
std::string error_of(const std::function<void()>& call, int culprit) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    call();
  } catch (const CommunicationError& error) {
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
    EXPECT_EQ(error.rank(), culprit) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "returned";
  return "";
}

class CommunicatorFailureTest : public testing::TestWithParam<const char*> {
 protected:
  RunRanksOptions options(std::chrono::milliseconds timeout = 60s) const {
    return {.backend = GetParam(), .timeout = timeout};
  }
};

TEST_P(CommunicatorFailureTest, AbortEndsEveryKindOfWaitWithItsReason) {
  for (const Waiting& waiting : all_waits()) {
    run_ranks(
        3,
        [&](Context context) {
          Communicator& communicator = context.communicator();
          if (context.rank() == 1) {
            std::this_thread::sleep_for(100ms);
            communicator.abort("disk full");
          }
          const std::string text = error_of([&] { waiting.call(communicator); }, 1);
          EXPECT_THAT(text, HasSubstr("aborted by rank 1: disk full"));
          EXPECT_THAT(text, HasSubstr(waiting.name + " on rank " + std::to_string(context.rank())));
        },
        options());
  }
}

TEST_P(CommunicatorFailureTest, AfterAnAbortEveryCallThrowsTheSameReason) {
  run_ranks(
      2,
      [](Context context) {
        Communicator& communicator = context.communicator();
        const auto segment = communicator.allocate(16);
        communicator.barrier();
        if (context.rank() == 0) communicator.abort("first");
        error_of([&] { communicator.barrier(); }, 0);
        communicator.abort("second");
        std::array<std::byte, 32> output;
        const ReduceInput inputs[2];
        auto calls = all_waits();
        calls.push_back({"gather of layers.3", [&](Communicator& c) {
                           c.gather({segment.get(), 0, 16, output.data(), "layers.3"});
                         }});
        calls.push_back({"reduce of layers.3", [&](Communicator& c) {
                           c.reduce({.inputs = inputs, .numel = 1, .output = output.data(), .label = "layers.3"});
                         }});
        calls.push_back({"read", [&](Communicator& c) { c.read(*segment, 0, 0, output); }});
        calls.push_back({"check", [&](Communicator& c) { c.check(); }});
        for (const Waiting& waiting : calls) {
          const std::string text = error_of([&] { waiting.call(communicator); }, 0);
          EXPECT_THAT(text, HasSubstr(waiting.name));
          EXPECT_THAT(text, HasSubstr("aborted by rank 0: first"));
          EXPECT_THAT(text, Not(HasSubstr("second")));
        }
      },
      options());
}

TEST_P(CommunicatorFailureTest, ALongReasonIsCutAndNotOverrun) {
  run_ranks(
      2,
      [](Context context) {
        if (context.rank() == 0) context.communicator().abort(std::string(100'000, 'x'));
        const std::string text = error_of([&] { context.communicator().barrier(); }, 0);
        EXPECT_LT(text.size(), 2000U);
        EXPECT_THAT(text, HasSubstr("xxx"));
      },
      options());
}

TEST_P(CommunicatorFailureTest, ATimeoutNamesTheOperationAndTheRanksThatDidNotCome) {
  std::atomic<int> failed{0};
  run_ranks(
      4,
      [&](Context context) {
        Communicator& communicator = context.communicator();
        communicator.barrier();
        if (context.rank() % 2 == 1) {
          while (failed.load() < 2) std::this_thread::sleep_for(1ms);
          return;
        }
        float value = 0;
        const std::string text = error_of(
            [&] { communicator.all_reduce(reinterpret_cast<std::byte*>(&value), 1, DType::kFloat32, ReduceOp::kSum); },
            1);
        failed.fetch_add(1);
        EXPECT_THAT(text, HasSubstr("all_reduce timed out on rank"));
        EXPECT_THAT(
            text,
            testing::ContainsRegex(
                "did not come: rank 1 \\(pid [0-9]+\\), last in barrier; rank 3 \\(pid [0-9]+\\), last in barrier;"));
      },
      options(300ms));
}

TEST_P(CommunicatorFailureTest, ATimeoutOfWaitUntilNamesWhatIsAwaited) {
  std::atomic<bool> failed{false};
  run_ranks(
      2,
      [&](Context context) {
        context.communicator().barrier();
        if (context.rank() == 1) {
          while (!failed.load()) std::this_thread::sleep_for(1ms);
          return;
        }
        const std::string text = error_of(
            [&] { context.communicator().wait_until([] { return false; }, "gradients of layers.3"); }, 1);
        failed = true;
        EXPECT_THAT(text, HasSubstr("gradients of layers.3 timed out on rank 0 after 0.3 s"));
        EXPECT_THAT(text, HasSubstr("last in barrier"));
      },
      options(300ms));
}

TEST_P(CommunicatorFailureTest, ARankThatHasLeftIsNamedAtOnce) {
  run_ranks(
      3,
      [](Context context) {
        if (context.rank() == 1) return;
        EXPECT_THAT(error_of([&] { context.communicator().barrier(); }, 1),
                    testing::ContainsRegex("rank 1 \\(pid [0-9]+\\) has left"));
      },
      options());
}

TEST_P(CommunicatorFailureTest, AWaitIsHopelessOnceEveryPeerHasLeft) {
  run_ranks(
      3,
      [](Context context) {
        if (context.rank() != 0) return;
        const std::string text = error_of(
            [&] { context.communicator().wait_until([] { return false; }, "gradients of layers.3"); }, 2);
        EXPECT_THAT(text, HasSubstr("has left (its Context was destroyed), as has every peer, while rank 0 waits in "
                                    "gradients of layers.3"));
      },
      options());
}

TEST_P(CommunicatorFailureTest, AWaitGoesOnWhileAPeerIsThere) {
  std::atomic<bool> done{false};
  run_ranks(
      3,
      [&](Context context) {
        if (context.rank() == 1) return;
        if (context.rank() == 2) {
          std::this_thread::sleep_for(1500ms);  // longer than a wait without peers would last
          done = true;
          context.communicator().ring();
          return;
        }
        context.communicator().wait_until([&] { return done.load(); }, "rank 2");
      },
      options());
}

TEST_P(CommunicatorFailureTest, ARankThatLeavesAfterComingIsNotMissed) {
  for (int round = 0; round < 50; ++round) {
    run_ranks(
        4, [](Context context) { context.communicator().barrier(); }, options());
  }
}

TEST_P(CommunicatorFailureTest, APostWakesASleeperBeforeItLooksByItself) {
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(
      4,
      [&](Context context) {
        const auto board = context.communicator().allocate_board(1);
        for (int round = 0; round < 400; ++round) {
          if (round % 4 == context.rank()) board->post(0, static_cast<std::uint64_t>(round + 1));
          context.communicator().wait_until(
              [&] { return board->word(round % 4, 0) > static_cast<std::uint64_t>(round); }, "a turn");
        }
      },
      options());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s) << "20 s if each turn waits for the 50 ms look";
}

double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

TEST_P(CommunicatorFailureTest, WaitingRanksSleep) {
  std::atomic<bool> done{false};
  double spent = 0;
  run_ranks(
      8,
      [&](Context context) {
        context.communicator().barrier();
        if (context.rank() != 0) {
          context.communicator().wait_until([&] { return done.load(); }, "rank 0");
          context.communicator().barrier();
          return;
        }
        const double before = cpu_seconds();
        std::this_thread::sleep_for(500ms);
        spent = cpu_seconds() - before;
        done = true;
        context.communicator().ring();
        context.communicator().barrier();
      },
      options());
  EXPECT_LT(spent, 0.25) << "seven waiting ranks used the processor";
}

INSTANTIATE_TEST_SUITE_P(, CommunicatorFailureTest, testing::Values("thread", "shm", "tcp"),
                         [](const auto& instance) { return instance.param; });

}  // namespace
}  // namespace fsdp
