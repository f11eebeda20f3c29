// What a rank writes down when its group fails.
#include <chrono>
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/context.h>

#include "comm/flight_recorder.h"
#include "tests/comm/rank_processes.h"

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::UnorderedElementsAre;

std::string contents(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// The calls that a crash file or a recorder's text lists.
std::vector<std::string> calls_in(const std::string& text) {
  std::vector<std::string> calls;
  static const std::regex line(R"( *\d+ +-?\d+\.\d{6} +(not over|\d+\.\d{6}) +\d+  ([^\n]*)\n)");
  for (std::sregex_iterator match(text.begin(), text.end(), line), end; match != end; ++match)
    calls.push_back((*match)[1] == "not over" ? (*match)[2].str() + ", not over" : (*match)[2].str());
  return calls;
}

TEST(FlightRecorderTest, ListsCallsInTheirOrderWithTheOnesThatAreNotOver) {
  FlightRecorder recorder;
  const FlightRecorder::Call outer(recorder, {Operation::kReduce, "layers.3"}, 4096);
  { const FlightRecorder::Call inner(recorder, {Operation::kBarrier}, 0); }
  EXPECT_THAT(calls_in(recorder.to_text(FlightRecorder::Clock::now())),
              ElementsAre("reduce of layers.3, 4096 bytes, not over", "barrier"));
}

TEST(FlightRecorderTest, KeepsTheLast64) {
  FlightRecorder recorder;
  const FlightRecorder::Call oldest(recorder, {Operation::kBarrier}, 0);  // its end finds another in its place
  {
    const FlightRecorder::Call old(recorder, {Operation::kBarrier}, 0);
    for (int i = 0; i < 100; ++i)
      const FlightRecorder::Call call(recorder, {Operation::kGather, fmt::format("{}", i)}, 0);
  }
  const auto calls = calls_in(recorder.to_text(FlightRecorder::Clock::now()));
  ASSERT_EQ(calls.size(), FlightRecorder::kEntries);
  for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_EQ(calls[i], fmt::format("gather of {}", i + 36));
}

TEST(FlightRecorderTest, KeepsTheEndOfALongLabel) {
  FlightRecorder recorder;
  { const FlightRecorder::Call call(recorder, {Operation::kGather, std::string(100, 'x') + ".layers.7"}, 0); }
  EXPECT_THAT(calls_in(recorder.to_text(FlightRecorder::Clock::now())),
              ElementsAre("gather of " + std::string(RankStatus::kLabelBytes - 9, 'x') + ".layers.7"));
}

TEST(FlightRecorderTest, ManyThreadsLoseNoCall) {
  FlightRecorder recorder;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int call = 0; call < 1000; ++call) const FlightRecorder::Call one(recorder, {Operation::kRead}, 1);
      });
    }
  }
  const std::string text = recorder.to_text(FlightRecorder::Clock::now());
  EXPECT_EQ(calls_in(text), std::vector<std::string>(FlightRecorder::kEntries, "read, 1 bytes"));
  EXPECT_THAT(text, AllOf(ContainsRegex("\n +4000 "), Not(HasSubstr(" 4001 "))));
}

class CrashFileTest : public testing::TestWithParam<const char*> {
 protected:
  // Three ranks in steps of three calls, of which rank 1 dies; its peers' outcomes are errors.
  void crash(const std::string& folder) {
    constexpr int kWorldSize = 3;
    outcomes_.clear();
    const PrivateFolder place;
    const JobPlace job(place.path());
    RankProcesses processes;
    for (int rank = 0; rank < kWorldSize; ++rank) {
      auto variables = job.variables(GetParam(), rank, kWorldSize);
      variables["FSDP_CRASH_DIR"] = folder;
      processes.start(variables, [] {
        const Context context = init();
        Communicator& communicator = context.communicator();
        const auto segment = communicator.allocate(64);
        std::vector<std::byte> all(64 * static_cast<std::size_t>(context.world_size()));
        for (int step = 0;; ++step) {
          communicator.report_progress({.step = step});
          communicator.gather({segment.get(), 0, 64, all.data(), "layers.0"});
          communicator.all_gather(std::as_bytes(std::span("abc")), std::span(all).first(4U * context.world_size()));
          communicator.barrier();
          if (step == 30 && context.rank() == 1) ::raise(SIGKILL);
        }
        return std::string();
      });
    }
    for (int rank = 0; rank < kWorldSize; ++rank) outcomes_.push_back(processes.outcome(rank));
  }

  PrivateFolder folder_;
  std::vector<std::string> outcomes_;
};

TEST_P(CrashFileTest, OfEachSurvivorTellsItsLastCallsAndWhereTheOthersWere) {
  crash(folder_.path());
  EXPECT_THAT(folder_.entries(), UnorderedElementsAre("crash-r0.txt", "crash-r2.txt"));
  for (const int rank : {0, 2}) {
    const auto path = folder_.path() / fmt::format("crash-r{}.txt", rank);
    EXPECT_THAT(outcomes_[static_cast<std::size_t>(rank)],
                HasSubstr("(this rank's last calls: " + path.string() + ")"));
    const std::string text = contents(path);
    EXPECT_THAT(text, ContainsRegex(fmt::format("^libfsdp crash file: rank {} \\(pid [0-9]+\\) of 3, 20", rank)));
    EXPECT_THAT(text, HasSubstr("\nreason: rank 1 (pid "));
    for (const int other : {0, 1, 2}) EXPECT_THAT(text, ContainsRegex(fmt::format("\n  rank {} .*, last in ", other)));
    const auto calls = calls_in(text);
    ASSERT_EQ(calls.size(), FlightRecorder::kEntries);
    EXPECT_THAT(calls.back(), HasSubstr(", not over"));
    EXPECT_THAT(calls, testing::IsSupersetOf({"gather of layers.0, 64 bytes", "all_gather, 4 bytes", "barrier"}));
  }
}

TEST_P(CrashFileTest, LeavesThoseOfEarlierCrashesAlone) {
  crash(folder_.path());
  const std::string first = contents(folder_.path() / "crash-r0.txt");
  crash(folder_.path());
  EXPECT_THAT(folder_.entries(),
              UnorderedElementsAre("crash-r0.txt", "crash-r0.2.txt", "crash-r2.txt", "crash-r2.2.txt"));
  EXPECT_EQ(contents(folder_.path() / "crash-r0.txt"), first);
  EXPECT_THAT(contents(folder_.path() / "crash-r0.2.txt"), HasSubstr("reason: rank 1 (pid "));
}

TEST_P(CrashFileTest, IsNotWrittenWhereNoFolderIsNamed) {
  crash("");
  EXPECT_THAT(outcomes_[0], AllOf(HasSubstr("died, last in "), Not(HasSubstr("last calls"))));
}

TEST_P(CrashFileTest, ThatCannotBeWrittenIsSaidBesideTheReason) {
  crash(folder_.path() / "missing");
  EXPECT_THAT(folder_.entries(), IsEmpty());
  EXPECT_THAT(outcomes_[0], AllOf(HasSubstr("rank 1 (pid "), HasSubstr("died, last in "),
                                  HasSubstr("last calls could not be kept: write "), HasSubstr("No such file"),
                                  HasSubstr("FSDP_CRASH_DIR")));
}

INSTANTIATE_TEST_SUITE_P(, CrashFileTest, testing::Values("shm", "tcp"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace fsdp
