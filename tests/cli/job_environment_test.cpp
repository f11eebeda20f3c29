#include "cli/job_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::Key;
using testing::Not;
using testing::Pair;
using testing::UnorderedElementsAre;

const JobEnvironment kJob{.world_size = 4,
                          .threads_per_rank = 2,
                          .master_port = 2345,
                          .job_id = "job",
                          .token = "5ec4e7",
                          .backend = "",
                          .directory = "/tmp/d"};

TEST(JobEnvironmentTest, TellsARankWhatTorchrunWould) {
  EXPECT_THAT(
      kJob.variables(3, false),
      UnorderedElementsAre(Pair("RANK", "3"), Pair("WORLD_SIZE", "4"), Pair("LOCAL_RANK", "3"),
                           Pair("LOCAL_WORLD_SIZE", "4"), Pair("MASTER_ADDR", "127.0.0.1"), Pair("MASTER_PORT", "2345"),
                           Pair("TORCHELASTIC_RUN_ID", "job"), Pair("FSDP_JOB_TOKEN", "5ec4e7"),
                           Pair("OMP_NUM_THREADS", "2"), Pair("FSDP_RENDEZVOUS", "/tmp/d/rendezvous")));
}

TEST(JobEnvironmentTest, LeavesTheUsersThreadCountAlone) {
  EXPECT_THAT(kJob.variables(0, true), Not(Contains(Key("OMP_NUM_THREADS"))));
}

TEST(JobEnvironmentTest, NamesABackendOnlyWhenOneWasAskedFor) {
  EXPECT_THAT(kJob.variables(0, false), Not(Contains(Key("FSDP_BACKEND"))));
  auto job = kJob;
  job.backend = "shm";
  EXPECT_THAT(job.variables(0, false), Contains(Pair("FSDP_BACKEND", "shm")));
}

TEST(JobEnvironmentTest, MakesADirectoryThatOnlyTheUserMayEnter) {
  const auto job = make_job_environment(1000, "");
  EXPECT_EQ(std::filesystem::status(job.directory).permissions(), std::filesystem::perms::owner_all);
  EXPECT_EQ(job.threads_per_rank, 1);
  EXPECT_GT(job.master_port, 0);
  std::filesystem::remove(job.directory);
}

TEST(JobEnvironmentTest, GivesTwoJobsNothingInCommon) {
  const auto a = make_job_environment(2, ""), b = make_job_environment(2, "");
  EXPECT_NE(a.directory, b.directory);
  EXPECT_NE(a.job_id, b.job_id);
  std::filesystem::remove(a.directory);
  std::filesystem::remove(b.directory);
}

class TemporaryDirectoryVariable : public testing::TestWithParam<std::pair<std::string, std::string>> {
 protected:
  void SetUp() override {
    const char* before = std::getenv("TMPDIR");
    before_ = before ? before : "";
  }
  void TearDown() override { before_.empty() ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", before_.c_str(), 1); }
  std::string before_;
};

TEST_P(TemporaryDirectoryVariable, IsRefusedByNameWhereNoSocketFits) {
  ::setenv("TMPDIR", GetParam().first.c_str(), 1);
  try {
    make_job_environment(2, "");
    FAIL() << "expected InvalidArgument";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr(GetParam().first));
    EXPECT_THAT(error.what(), HasSubstr(GetParam().second));
  }
}

INSTANTIATE_TEST_SUITE_P(JobEnvironmentTest, TemporaryDirectoryVariable,
                         testing::Values(std::pair{"/tmp/" + std::string(90, 'x'), "too long"},
                                         std::pair{"/no/such/place", "No such file or directory"}),
                         [](const auto& test) { return std::string(test.index == 0 ? "TooLong" : "Missing"); });

}  // namespace
}  // namespace fsdp
