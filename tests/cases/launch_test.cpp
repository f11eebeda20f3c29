// How jobs start, and fail to: ranks are processes, over both backends for them.
#include <chrono>
#include <map>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

#include "comm/tcp_socket.h"
#include "tests/comm/rank_processes.h"

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

std::string meet_and_average() {
  Context context = init({.timeout = 4s});
  return std::to_string(context.rank()) + " of " + std::to_string(context.world_size()) + ", local " +
         std::to_string(context.local_rank()) + ", mean " + std::to_string(context.mean(context.rank()));
}

class Launch : public testing::TestWithParam<const char*> {
 protected:
  int start(const JobPlace& job, int rank, int world_size,
            const std::function<std::string()>& body = meet_and_average) {
    return processes_.start(job.variables(GetParam(), rank, world_size), body);
  }
  PrivateFolder folder_;
  RankProcesses processes_;
};

// C48: three of four ranks are started; and one is killed between the rendezvous and the first collective, where
// peers often make their connections: nobody waits without end, and all say who is missing.
using C48Launch = Launch;
TEST_P(C48Launch, TheMissingRankIsNamedAtItsTimeout) {
  const JobPlace job(folder_.path());
  const auto begin = std::chrono::steady_clock::now();
  for (const int rank : {0, 1, 3}) start(job, rank, 4);
  for (const int child : {0, 1, 2})
    EXPECT_THAT(processes_.outcome(child), HasSubstr("3 of 4 ranks came within 4 s, missing: rank 2"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 8s);
}

TEST_P(C48Launch, ADeathBeforeTheFirstCollectiveIsNamed) {
  const JobPlace job(folder_.path());
  for (const int rank : {0, 1, 2, 3}) {
    start(job, rank, 4, [] {
      Context context = init();
      if (context.rank() == 2) ::raise(SIGKILL);
      return std::to_string(context.mean(1));
    });
  }
  const std::string victim = "rank 2 (pid " + std::to_string(processes_.pid(2)) + ") died, last in no collective";
  for (const int child : {0, 1, 3}) EXPECT_THAT(processes_.outcome(child), HasSubstr(victim));
}

// C66: two jobs on one host at once, each with places of its own, do not meet; one whose place is taken says by whom.
using C66Launch = Launch;
TEST_P(C66Launch, TwoJobsAtOnceDoNotMeet) {
  for (int round = 0; round < 10; ++round) {
    const PrivateFolder other_folder;
    const JobPlace first(folder_.path()), second(other_folder.path());
    std::vector<int> children;
    for (const int rank : {0, 1}) {
      children.push_back(start(first, rank, 2));
      children.push_back(start(second, 1 - rank, 2));
    }
    for (const int child : children) EXPECT_THAT(processes_.outcome(child), HasSubstr("mean 0.5"));
  }
}

TEST_P(C66Launch, APlaceThatIsTakenIsNamedWithinSeconds) {
  const JobPlace job(folder_.path());
  const int holder = start(job, 0, 2);
  std::this_thread::sleep_for(300ms);
  const auto begin = std::chrono::steady_clock::now();
  const int second = start(job, 0, 2);
  EXPECT_THAT(processes_.outcome(second),
              AnyOf(AllOf(HasSubstr("cannot listen at 127.0.0.1:" + std::to_string(job.port())),
                          HasSubstr("pid " + std::to_string(processes_.pid(holder)))),
                    HasSubstr("rank 0 of another job listens there")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s);
  start(job, 1, 2);
  EXPECT_THAT(processes_.outcome(holder), HasSubstr("mean 0.5"));
}

// C67: the variables count, not what devices or cores the host has.
using C67Launch = Launch;
TEST_P(C67Launch, AnyNumberOfRanksIsWhatTheVariablesSay) {
  for (const int world_size : {1, 2, 5}) {
    const JobPlace job(folder_.path());
    std::vector<int> children;
    for (int rank = 0; rank < world_size; ++rank) children.push_back(start(job, rank, world_size));
    for (int rank = 0; rank < world_size; ++rank)
      EXPECT_THAT(
          processes_.outcome(children[static_cast<std::size_t>(rank)]),
          HasSubstr(std::to_string(rank) + " of " + std::to_string(world_size) + ", local " + std::to_string(rank)));
  }
}

INSTANTIATE_TEST_SUITE_P(, C48Launch, testing::Values("shm", "tcp"),
                         [](const auto& tested) { return std::string(tested.param); });
INSTANTIATE_TEST_SUITE_P(, C66Launch, testing::Values("shm", "tcp"),
                         [](const auto& tested) { return std::string(tested.param); });
INSTANTIATE_TEST_SUITE_P(, C67Launch, testing::Values("shm", "tcp"),
                         [](const auto& tested) { return std::string(tested.param); });

class TcpLaunch : public testing::Test {
 protected:
  std::string outcome_of(int rank, const Variables& more) {
    Variables variables = JobPlace(folder_.path()).variables("tcp", rank, 2);
    for (const auto& [name, value] : more) variables[name] = value;
    return processes_.outcome(processes_.start(variables, meet_and_average));
  }
  PrivateFolder folder_;
  RankProcesses processes_;
};

// C69: the host's name stands for a loopback address, so that other hosts would go to themselves: rank 0 says so and
// names an address that they can reach. Who cannot get there says from where it tried. (Two hosts: tests/interop/hosts.)
using C69Launch = TcpLaunch;
TEST_F(C69Launch, ANameOfLoopbackIsRefusedWhereRanksAreOnOtherHosts) {
  EXPECT_THAT(
      outcome_of(0, {{"LOCAL_WORLD_SIZE", "1"}, {"MASTER_ADDR", "localhost"}}),
      AnyOf(
          AllOf(HasSubstr("MASTER_ADDR: localhost is 127.0.0.1 here"), HasSubstr("set MASTER_ADDR to this host's own")),
          AllOf(HasSubstr("MASTER_ADDR: localhost is ::1 here"), HasSubstr("set MASTER_ADDR to this host's own"))));
}

TEST_F(C69Launch, AFailedConnectionShowsBothEnds) {
  const std::string text = outcome_of(1, {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}, {"FSDP_TIMEOUT", "0.2"}});
  EXPECT_THAT(text, HasSubstr("rank 1 met no rank 0 within 0.2 s (tried 127.0.0.1:1 from 127.0.0.1)"));
}

// C70: an address, a pattern or a wrong name in the place of an interface's name.
using C70Launch = TcpLaunch;
TEST_F(C70Launch, AWrongInterfaceIsNamedWithThoseThatThereAre) {
  const auto begin = std::chrono::steady_clock::now();
  for (const char* wrong : {"127.0.0.1", "^lo", "eth99", "lo,eth0", " lo"}) {
    for (const int rank : {0, 1})
      EXPECT_THAT(
          outcome_of(rank, {{"FSDP_SOCKET_IFNAME", wrong}}),
          AllOf(HasSubstr("FSDP_SOCKET_IFNAME: this host has no interface " + std::string(wrong)), HasSubstr("lo")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

struct LauncherCase {
  const char* name;
  std::vector<std::string> names;  // rank, ranks, local rank, local ranks
  Variables more = {};
};
void PrintTo(const LauncherCase& value, std::ostream* out) { *out << value.name; }

const LauncherCase kLaunchers[] = {
    {"Mpi",
     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}},
    {"Mvapich",
     {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"}},
    {"Pmi", {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}},
    {"Slurm",
     {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
     {{"SLURM_STEP_ID", "0"}, {"SLURM_NODEID", "0"}}},
};

class C74Launch : public testing::TestWithParam<std::tuple<const char*, LauncherCase>> {
 protected:
  // Starts a rank with the names of the launcher alone, of which the last `lacking` are not set.
  int start(const JobPlace& job, int rank, int lacking) {
    const auto& [backend, launcher] = GetParam();
    Variables variables = job.variables(backend, rank, 2);
    for (const char* name : kOwn) variables.erase(name);
    for (const auto& [name, value] : launcher.more) variables[name] = value;
    const std::string values[] = {std::to_string(rank), "2", std::to_string(rank), "2"};
    for (std::size_t i = 0; i + static_cast<std::size_t>(lacking) < 4; ++i) variables[launcher.names[i]] = values[i];
    return processes_.start(variables, [] {
      for (const char* name : kOwn) ::unsetenv(name);
      return meet_and_average();
    });
  }
  static constexpr const char* kOwn[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
  PrivateFolder folder_;
  RankProcesses processes_;
};

// C74: under a launcher other than torchrun the usual names do not exist. Its own are enough; where one of them lacks, an
// error lists what was looked for and what was found.
TEST_P(C74Launch, TheLaunchersOwnNamesAreEnough) {
  const JobPlace job(folder_.path());
  for (const int rank : {0, 1}) start(job, rank, 0);
  for (const int rank : {0, 1})
    EXPECT_EQ(processes_.outcome(rank),
              std::to_string(rank) + " of 2, local " + std::to_string(rank) + ", mean 0.500000");
}

TEST_P(C74Launch, AMissingNameIsListedWithThoseThatAreThere) {
  const auto& names = std::get<1>(GetParam()).names;
  const std::string text = processes_.outcome(start(JobPlace(folder_.path()), 1, 1));
  EXPECT_THAT(text, AllOf(HasSubstr(names[0] + "=1"), HasSubstr(names[1] + "=2"), HasSubstr(names[2] + "=1"),
                          HasSubstr(names[3] + " unset"), HasSubstr("fsdp run")));
}

INSTANTIATE_TEST_SUITE_P(, C74Launch, testing::Combine(testing::Values("shm", "tcp"), testing::ValuesIn(kLaunchers)),
                         [](const auto& tested) {
                           return std::string(std::get<0>(tested.param)) + std::get<1>(tested.param).name;
                         });

}  // namespace
}  // namespace fsdp
