// Jobs that start in disorder, many at once on one host: each comes together, or says what is wrong with it, in its time. No
// job meets a rank of another.
//
// FSDP_TEST_ROUNDS sets how many jobs there are; FSDP_TEST_SEED where they begin.
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <random>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/context.h>

#include "comm/meeting_file.h"
#include "tests/comm/rank_processes.h"

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::UnorderedElementsAreArray;
using Clock = std::chrono::steady_clock;
using Variables = std::map<std::string, std::string>;

constexpr auto kTimeout = 2s;
constexpr int kAtOnce = 25;  // jobs

int number_of(const char* variable, int fallback) {
  const char* text = std::getenv(variable);
  return text == nullptr ? fallback : std::atoi(text);
}

enum class Disorder { kNone, kOneIsMissing, kOneIsThereTwice, kAnotherWorldSize, kAnotherToken, kStaleMeetingFile };
constexpr std::array kDisorders{Disorder::kNone,
                                Disorder::kNone,
                                Disorder::kNone,
                                Disorder::kOneIsMissing,
                                Disorder::kOneIsThereTwice,
                                Disorder::kAnotherWorldSize,
                                Disorder::kAnotherToken,
                                Disorder::kStaleMeetingFile};
constexpr const char* kNames[] = {"none",          "one missing",       "one twice", "another world size",
                                  "another token", "stale meeting file"};

struct Job {
  PrivateFolder folder = {};
  int number = 0, world_size = 2;
  std::string backend = "shm";
  Disorder disorder = Disorder::kNone;
  int odd = 0;  // the rank that the disorder is about
  std::vector<int> children = {};

  std::string to_string() const {
    return fmt::format("job {}: {} of {} ranks, {}, rank {}", number, backend, world_size,
                       kNames[static_cast<int>(disorder)], odd);
  }
};

class StartupTest : public testing::Test {
 protected:
  void plan(Job& job, int number) {
    job.number = number;
    job.world_size = 2 + static_cast<int>(random_() % 3);
    job.disorder = kDisorders[random_() % kDisorders.size()];
    const bool needs_tcp = job.disorder == Disorder::kAnotherToken || job.disorder == Disorder::kStaleMeetingFile;
    job.backend = needs_tcp || random_() % 2 == 0 ? "tcp" : "shm";
    job.odd = static_cast<int>(random_() % static_cast<unsigned>(job.world_size));
    if (job.disorder == Disorder::kAnotherToken) job.odd = 1;  // of rank 0 it would be all others'
  }

  void start_rank(Job& job, RankProcesses& processes, Variables variables) {
    const auto delay = std::chrono::milliseconds(random_() % 500);
    job.children.push_back(processes.start(variables, [delay, number = job.number] {
      std::this_thread::sleep_for(delay);
      const Context context = init({.timeout = kTimeout});
      // A rank of another job would bring another number.
      const double mean = context.mean(number);
      return fmt::format("rank {} of {} in job {}", context.rank(), context.world_size(), mean);
    }));
  }

  void start(Job& job, RankProcesses& processes) {
    const JobPlace place(job.folder.path());
    std::vector<int> ranks;
    for (int rank = 0; rank < job.world_size; ++rank) ranks.push_back(rank);
    if (job.disorder == Disorder::kOneIsMissing) ranks.erase(ranks.begin() + job.odd);
    if (job.disorder == Disorder::kOneIsThereTwice) ranks.push_back(job.odd);
    std::shuffle(ranks.begin(), ranks.end(), random_);
    const std::filesystem::path file = job.folder.path() / "meet";
    if (job.disorder == Disorder::kStaleMeetingFile)
      write_meeting_file(file, {"", random_token(), {*to_numeric_address("127.0.0.1", 1)}});
    for (const int rank : ranks) {
      Variables variables = place.variables(job.backend, rank, job.world_size);
      if (rank == job.odd && job.disorder == Disorder::kAnotherWorldSize)
        variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(job.world_size + 1);
      if (rank == job.odd && job.disorder == Disorder::kAnotherToken)
        variables["FSDP_JOB_TOKEN"] = to_hex(random_token());
      if (job.disorder == Disorder::kStaleMeetingFile) variables["FSDP_INIT_METHOD"] = "file://" + file.string();
      start_rank(job, processes, std::move(variables));
    }
  }

  static void check(const Job& job, RankProcesses& processes) {
    std::vector<std::string> errors, good, all;
    for (const int child : job.children) {
      const std::string text = processes.outcome(child);
      (text.starts_with("error: ") ? errors : good).push_back(text);
    }
    for (int rank = 0; rank < job.world_size; ++rank)
      all.push_back(fmt::format("rank {} of {} in job {}", rank, job.world_size, job.number));
    switch (job.disorder) {
      case Disorder::kNone:
      case Disorder::kStaleMeetingFile:
        EXPECT_THAT(errors, IsEmpty()) << job.to_string();
        EXPECT_THAT(good, UnorderedElementsAreArray(all)) << job.to_string();
        return;
      case Disorder::kOneIsThereTwice:  // the second comes while the others meet, or when they have gone
        EXPECT_THAT(good, AnyOf(IsEmpty(), UnorderedElementsAreArray(all))) << job.to_string();
        EXPECT_THAT(errors, Not(IsEmpty())) << job.to_string();
        break;
      default: EXPECT_THAT(good, IsEmpty()) << job.to_string();
    }
    // Whoever is missing or wrong is named; who came too late to a port finds nobody, or somebody else.
    const std::string odd = fmt::format("rank {}", job.odd);
    EXPECT_THAT(errors, Each(AnyOf(HasSubstr(odd), HasSubstr("rank 0"), HasSubstr("expected world size"),
                                   HasSubstr("cannot listen at "), HasSubstr("missing: rank "))))
        << job.to_string();
  }

  std::mt19937 random_{static_cast<unsigned>(number_of("FSDP_TEST_SEED", 24))};
};

TEST_F(StartupTest, JobsInDisorderComeTogetherOrSayWhatIsWrong) {
  const int rounds = number_of("FSDP_TEST_ROUNDS", 100);
  std::map<Disorder, int> counts;
  for (int done = 0; done < rounds; done += kAtOnce) {
    std::vector<std::unique_ptr<Job>> jobs;
    RankProcesses processes;
    const auto begin = Clock::now();
    for (int i = done; i < std::min(done + kAtOnce, rounds); ++i) {
      plan(*jobs.emplace_back(std::make_unique<Job>()), i);
      ++counts[jobs.back()->disorder];
      start(*jobs.back(), processes);
    }
    for (const auto& job : jobs) check(*job, processes);
    EXPECT_LT(Clock::now() - begin, kTimeout + 500ms + 4s) << "jobs from " << done << " on";
  }
  for (const auto& [disorder, count] : counts)
    std::cout << count << " jobs with disorder: " << kNames[static_cast<int>(disorder)] << "\n";
}

}  // namespace
}  // namespace fsdp
