// Ranks that are processes, on every backend for them: the bits of threads, deaths seen and named.
#include <array>
#include <chrono>
#include <csignal>
#include <optional>
#include <stdexcept>
#include <thread>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

#include "tests/comm/rank_processes.h"
#include "tests/comm/reference.h"

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using reference::Bytes;
using testing::HasSubstr;
using testing::IsEmpty;

class RanksTest : public testing::Test {
 protected:
  // Starts ranks 0..world_size-1, child r is rank r.
  void start_all(const std::string& backend, int world_size, const std::function<std::string()>& body) {
    for (int rank = 0; rank < world_size; ++rank) processes_.start(job_.variables(backend, rank, world_size), body);
  }

  std::string named(int child) const {
    return "rank " + std::to_string(child) + " (pid " + std::to_string(processes_.pid(child)) + ") ";
  }

  PrivateFolder folder_;
  JobPlace job_{folder_.path()};
  RankProcesses processes_;
};

class ProcessTest : public RanksTest, public testing::WithParamInterface<const char*> {};

// All kinds of collectives on private memory and segments; the bytes of every result in a row.
std::string results_of_collectives(Context context) {
  constexpr std::int64_t kNumel = 501;
  Communicator& communicator = context.communicator();
  const std::size_t bytes = kNumel * sizeof(float);
  const auto ranks = static_cast<std::size_t>(context.world_size());
  Bytes data = reference::elements(DType::kFloat32, context.rank(), kNumel * context.world_size());
  std::string results;
  const auto keep = [&](std::span<const std::byte> part) {
    results.append(reinterpret_cast<const char*>(part.data()), part.size());
  };

  Bytes output(bytes);
  communicator.reduce_scatter(data.data(), output.data(), kNumel, DType::kFloat32);
  keep(output);
  const auto segment = communicator.allocate(data.size());
  std::ranges::copy(data, segment->local().begin());
  communicator.barrier();
  Bytes gathered(data.size());
  communicator.gather({segment.get(), bytes, bytes, gathered.data(), "unit"});
  keep(gathered);
  const std::vector<ReduceInput> inputs(ranks, {.source = segment.get()});
  communicator.reduce({.inputs = inputs, .numel = kNumel, .output = output.data(), .divisor = context.world_size()});
  keep(output);
  communicator.all_gather(output, std::span(gathered).first(ranks * bytes));
  keep(gathered);
  communicator.all_reduce(data.data(), kNumel, DType::kFloat32, ReduceOp::kSum);
  keep(data);
  communicator.barrier();
  return results;
}

TEST_P(ProcessTest, CollectivesGiveTheBitsOfThreadRanks) {
  constexpr int kWorldSize = 4;
  start_all(GetParam(), kWorldSize, [] { return results_of_collectives(init()); });
  std::vector<std::string> of_processes;
  for (int rank = 0; rank < kWorldSize; ++rank) of_processes.push_back(processes_.outcome(rank));
  run_ranks(kWorldSize, [&](Context context) {
    EXPECT_TRUE(results_of_collectives(context) == of_processes[static_cast<std::size_t>(context.rank())])
        << of_processes[0].substr(0, 200);
  });
}

TEST_P(ProcessTest, ARankThatEndsWithoutLeavingIsDead) {
  start_all(GetParam(), 2, [] {
    Context context = init();
    if (context.rank() == 1) ::_exit(0);
    context.communicator().barrier();
    return std::string("returned");
  });
  EXPECT_THAT(processes_.outcome(0), HasSubstr(named(1) + "died, last in no collective (seen by rank 0 in barrier)"));
}

TEST_P(ProcessTest, ARankThatLeavesIsNotDead) {
  start_all(GetParam(), 2, [] {
    std::optional<Context> context = init();
    context->communicator().barrier();
    if (context->rank() == 1) return std::string("left");
    std::this_thread::sleep_for(300ms);  // rank 1's process has ended by now
    context->communicator().check();
    try {
      context->communicator().barrier();
    } catch (const CommunicationError& error) {
      return std::string(error.what());
    }
    return std::string("returned");
  });
  EXPECT_THAT(processes_.outcome(0), HasSubstr(named(1) + "has left"));
}

TEST_P(ProcessTest, AnExceptionThatEndsARankEndsTheWaitsOfTheOthers) {
  start_all(GetParam(), 3, []() -> std::string {
    Context context = init();
    context.communicator().barrier();
    if (context.rank() == 1) throw std::runtime_error("out of data");
    context.communicator().wait_until([] { return false; }, "rank 1's gradients");
    return "returned";
  });
  EXPECT_EQ(processes_.outcome(1), "error: out of data");
  for (const int rank : {0, 2})
    EXPECT_THAT(processes_.outcome(rank), HasSubstr("aborted by rank 1: an exception ended this rank's part"));
}

TEST_P(ProcessTest, AForkedChildDoesNotLeaveForItsParent) {
  start_all(GetParam(), 2, [] {
    std::optional<Context> context = init();
    if (context->rank() == 1) {
      const pid_t child = ::fork();
      if (child == 0) {
        context.reset();
        ::_exit(0);
      }
      ::waitpid(child, nullptr, 0);
    }
    for (int i = 0; i < 10; ++i) context->communicator().barrier();
    return std::string("good");
  });
  EXPECT_EQ(processes_.outcome(0), "good");
  EXPECT_EQ(processes_.outcome(1), "good");
}

// Nothing waits for the stopped rank, and no time-out runs: it is missed all the same, and told from one that works long.
TEST_F(RanksTest, AStoppedRankIsMissedByItsSilence) {
  start_all("tcp", 3, [] {
    Context context = init({.silence = 3s});
    context.communicator().report_progress({.step = 41, .saved_step = 40});
    context.communicator().barrier();
    if (context.rank() == 1) ::raise(SIGSTOP);
    for (const auto end = std::chrono::steady_clock::now() + 10s; std::chrono::steady_clock::now() < end;) {
      std::this_thread::sleep_for(20ms);
      context.communicator().check();
    }
    return std::string("missed nobody");
  });
  const std::string pid = std::to_string(processes_.pid(1));
  for (const int child : {0, 2})
    EXPECT_THAT(processes_.outcome(child),
                testing::AllOf(HasSubstr("rank 1 takes no further part: it has been silent for 3 s, last in barrier"),
                               HasSubstr("(pid " + pid + ")")));
}

TEST_F(RanksTest, WhoWorksLongIsNotSilent) {
  start_all("tcp", 2, [] {
    Context context = init({.silence = 3s});
    if (context.rank() == 1) {
      for (const auto end = std::chrono::steady_clock::now() + 4s; std::chrono::steady_clock::now() < end;) {
      }
    }
    context.communicator().barrier();
    return std::string("good");
  });
  for (const int child : {0, 1}) EXPECT_EQ(processes_.outcome(child), "good");
}

// A rank that was itself stopped takes nobody for dead when it goes on.
TEST_F(RanksTest, WhoWasStoppedForAWhileGoesOn) {
  start_all("tcp", 2, [] {
    Context context = init({.silence = 4s});
    context.communicator().barrier();
    if (context.rank() == 1) ::raise(SIGSTOP);
    for (int i = 0; i < 100; ++i) context.communicator().barrier();
    return std::string("good");
  });
  int status = 0;
  ASSERT_EQ(::waitpid(processes_.pid(1), &status, WUNTRACED), processes_.pid(1));
  std::this_thread::sleep_for(3500ms);
  ::kill(processes_.pid(1), SIGCONT);
  for (const int child : {0, 1}) EXPECT_EQ(processes_.outcome(child), "good");
}

TEST_P(ProcessTest, ADeathNamesTheStepAndTheOneThatIsSaved) {
  start_all(GetParam(), 2, [] {
    Context context = init();
    context.communicator().report_progress({.step = 41, .saved_step = 40});
    const auto segment = context.communicator().allocate(64);
    std::array<std::byte, 128> gathered;
    context.communicator().gather({segment.get(), 0, 64, gathered.data(), "layers.7"});
    if (context.rank() == 1) std::this_thread::sleep_for(1500ms);  // its next beat tells the rest
    if (context.rank() == 1) ::raise(SIGKILL);
    context.communicator().wait_until([] { return false; }, "gradients of layers.6");
    return std::string("returned");
  });
  EXPECT_THAT(
      processes_.outcome(0),
      testing::AllOf(HasSubstr(named(1) + "died, last in gather of layers.7 in step 41 (seen by rank 0 in gradients "
                                          "of layers.6)"),
                     HasSubstr("restart from step 40, the last that was saved")));
}

INSTANTIATE_TEST_SUITE_P(, ProcessTest, testing::Values("shm", "tcp"),
                         [](const auto& instance) { return std::string(instance.param); });

struct Death {
  std::string name, last;  // what the others do, and what the victim did before it died
  // What ranks do until one of them is killed.
  std::function<void(Communicator&)> loop;
};

class DeathTest : public RanksTest, public testing::WithParamInterface<std::tuple<const char*, Death>> {};

TEST_P(DeathTest, AKilledRankIsNamedWithItsPidOnEveryOther) {
  constexpr int kVictim = 2;
  const auto& [backend, death] = GetParam();
  start_all(backend, 4, [&death = death] {
    Context context = init();
    context.communicator().barrier();
    // The victim of waits for others never comes.
    if (death.name == "wait_until" && context.rank() == kVictim) std::this_thread::sleep_for(60s);
    while (true) death.loop(context.communicator());
    return std::string("returned");
  });
  std::this_thread::sleep_for(300ms);
  const std::string victim = named(kVictim);
  EXPECT_THAT(folder_.entries(), IsEmpty()) << "while the ranks run";
  processes_.kill(kVictim);
  const auto killed = std::chrono::steady_clock::now();
  for (const int rank : {0, 1, 3}) {
    const std::string text = processes_.outcome(rank);
    EXPECT_THAT(text, HasSubstr("error: "));
    EXPECT_THAT(text, HasSubstr(victim + "died, last in " + death.last + " (seen by rank "));
    EXPECT_THAT(text, HasSubstr(" in " + death.name + "): it was killed"));
    EXPECT_THAT(text, HasSubstr("restart from the last checkpoint"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - killed, 2s);
  EXPECT_EQ(processes_.outcome(kVictim), "killed");
  EXPECT_THAT(folder_.entries(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(
    , DeathTest,
    testing::Combine(
        testing::Values("shm", "tcp"),
        testing::Values(Death{"barrier", "barrier", [](Communicator& c) { c.barrier(); }},
                        Death{"allocate", "allocate", [](Communicator& c) { c.allocate(std::size_t{1} << 20); }},
                        Death{"all_reduce", "all_reduce",
                              [](Communicator& c) {
                                std::vector<std::byte> data(std::size_t{1} << 20);
                                c.all_reduce(data.data(), 1 << 18, DType::kFloat32, ReduceOp::kSum);
                              }},
                        Death{"wait_until", "barrier", [](Communicator& c) { c.wait_until([] { return false; }, ""); }},
                        Death{"check", "barrier", [](Communicator& c) { c.check(); }})),
    [](const auto& instance) {
      return std::string(std::get<0>(instance.param)) + "_" + std::get<1>(instance.param).name;
    });

}  // namespace
}  // namespace fsdp
