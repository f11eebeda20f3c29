#include "comm/launch_environment.h"

#include <filesystem>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Variables torchrun(const char* rank, const char* world_size, const char* local_rank, const char* local_world_size) {
  return {
      {"RANK", rank}, {"WORLD_SIZE", world_size}, {"LOCAL_RANK", local_rank}, {"LOCAL_WORLD_SIZE", local_world_size}};
}

Variables open_mpi(const char* rank, const char* world_size, const char* local_rank, const char* local_world_size) {
  return {{"OMPI_COMM_WORLD_RANK", rank},
          {"OMPI_COMM_WORLD_SIZE", world_size},
          {"OMPI_COMM_WORLD_LOCAL_RANK", local_rank},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", local_world_size}};
}

Variables mvapich(const char* rank, const char* world_size, const char* local_rank, const char* local_world_size) {
  return {{"MV2_COMM_WORLD_RANK", rank},
          {"MV2_COMM_WORLD_SIZE", world_size},
          {"MV2_COMM_WORLD_LOCAL_RANK", local_rank},
          {"MV2_COMM_WORLD_LOCAL_SIZE", local_world_size}};
}

Variables pmi(const char* rank, const char* world_size, const char* local_rank, const char* local_world_size) {
  return {{"PMI_RANK", rank},
          {"PMI_SIZE", world_size},
          {"MPI_LOCALRANKID", local_rank},
          {"MPI_LOCALNRANKS", local_world_size}};
}

Variables srun(const char* rank, const char* world_size, const char* local_rank, const char* tasks,
               const char* node = "0") {
  return {{"SLURM_STEP_ID", "0"},
          {"SLURM_PROCID", rank},
          {"SLURM_STEP_NUM_TASKS", world_size},
          {"SLURM_LOCALID", local_rank},
          {"SLURM_STEP_TASKS_PER_NODE", tasks},
          {"SLURM_NODEID", node}};
}

std::string error_of(const Variables& variables, int rank = -1, int world_size = -1) {
  try {
    identify(variables, rank, world_size);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  ADD_FAILURE() << "identified";
  return "";
}

TEST(LaunchEnvironmentTest, IsASingleRankWithoutALauncher) {
  const LaunchIdentity self = identify({{"HOME", "/root"}}, -1, -1);
  EXPECT_EQ(self.rank, 0);
  EXPECT_EQ(self.world_size, 1);
  EXPECT_EQ(self.local_rank, 0);
  EXPECT_EQ(self.local_world_size, 1);
}

TEST(LaunchEnvironmentTest, TakesACompleteTorchrunSet) {
  const LaunchIdentity self = identify(torchrun("5", "8", "1", "4"), -1, -1);
  EXPECT_EQ(self.rank, 5);
  EXPECT_EQ(self.world_size, 8);
  EXPECT_EQ(self.local_rank, 1);
  EXPECT_EQ(self.local_world_size, 4);
}

TEST(LaunchEnvironmentTest, ExplicitOptionsWinOverTheLauncher) {
  const LaunchIdentity self = identify(torchrun("5", "8", "1", "4"), 1, 2);
  EXPECT_EQ(self.rank, 1);
  EXPECT_EQ(self.world_size, 2);
  EXPECT_EQ(self.local_rank, 1);
  EXPECT_EQ(self.local_world_size, 2);
  EXPECT_EQ(identify({{"RANK", "junk"}}, 0, 1).world_size, 1);
}

TEST(LaunchEnvironmentTest, HalfOfAnExplicitPairOrAnImpossibleOneIsRefused) {
  const std::pair<int, int> impossible[] = {{0, -1}, {-1, 2}, {2, 2}, {-2, 2}, {0, 0}, {3, 1}};
  for (const auto& [rank, world_size] : impossible)
    EXPECT_THAT(error_of({}, rank, world_size), HasSubstr("0 <= rank < world_size"));
}

TEST(LaunchEnvironmentTest, APartOfASetIsRefusedWithWhatWasFound) {
  for (const char* missing : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    Variables variables = torchrun("0", "2", "0", "2");
    variables.erase(missing);
    const std::string text = error_of(variables);
    EXPECT_THAT(text, HasSubstr(std::string(missing) + " unset"));
    EXPECT_THAT(text, HasSubstr("which set all of them, or unset them"));
  }
  EXPECT_THAT(error_of({{"WORLD_SIZE", "2"}}),
              HasSubstr("RANK unset, WORLD_SIZE=2, LOCAL_RANK unset, LOCAL_WORLD_SIZE unset"));
}

TEST(LaunchEnvironmentTest, ValuesThatCannotBeAreRefusedWithWhatWasFound) {
  const Variables impossible[] = {
      torchrun("2", "2", "0", "2"), torchrun("-1", "2", "0", "2"), torchrun("0", "0", "0", "0"),
      torchrun("0", "2", "2", "2"), torchrun("0", "2", "-1", "2"), torchrun("0", "2", "0", "4"),
      torchrun("0", "2", "1", "2"),
  };
  for (const Variables& variables : impossible) {
    EXPECT_THAT(error_of(variables),
                HasSubstr("RANK=" + variables.at("RANK") + ", WORLD_SIZE=" + variables.at("WORLD_SIZE")));
  }
  for (const char* junk : {"", "x", "1x", " 1", "1.0", "99999999999"}) {
    EXPECT_THAT(error_of(torchrun(junk, "2", "0", "2")),
                HasSubstr("integer in RANK, got \"" + std::string(junk) + "\""));
    EXPECT_THAT(error_of(torchrun("0", "2", "0", junk)), HasSubstr("integer in LOCAL_WORLD_SIZE"));
  }
}

struct Told {
  const char* launcher;
  Variables (*set)(const char*, const char*, const char*, const char*);
};

Variables srun_on_one_node(const char* rank, const char* world_size, const char* local_rank, const char* tasks) {
  return srun(rank, world_size, local_rank, tasks);
}

// In the order in which they are asked.
const Told kLaunchers[] = {
    {"torchrun", torchrun}, {"Open MPI", open_mpi}, {"MVAPICH", mvapich}, {"PMI", pmi}, {"srun", srun_on_one_node}};

TEST(LaunchEnvironmentTest, EachLauncherIsUnderstood) {
  for (const Told& told : kLaunchers) {
    const LaunchIdentity self = identify(told.set("5", "8", "1", "4"), -1, -1);
    EXPECT_EQ(self.launcher, told.launcher);
    EXPECT_EQ(self.rank, 5) << told.launcher;
    EXPECT_EQ(self.world_size, 8) << told.launcher;
    EXPECT_EQ(self.local_rank, 1) << told.launcher;
    EXPECT_EQ(self.local_world_size, 4) << told.launcher;
  }
}

// torchrun under srun, mpirun in an allocation of Slurm, ...: the inner launcher is the one asked first.
TEST(LaunchEnvironmentTest, TheFirstCompleteSetWins) {
  for (const Told& inner : kLaunchers) {
    for (const Told* outer = &inner + 1; outer != std::end(kLaunchers); ++outer) {
      Variables both = outer->set("0", "1", "0", "1");
      const Variables more = inner.set("3", "4", "3", "4");
      both.insert(more.begin(), more.end());
      EXPECT_EQ(identify(both, -1, -1).launcher, inner.launcher) << "in " << outer->launcher;
      both.erase(more.begin()->first);
      EXPECT_THAT(error_of(both), AllOf(HasSubstr(std::string("a part of ") + inner.launcher), HasSubstr("unset")));
      both.insert({more.begin()->first, "junk"});
      EXPECT_NE(error_of(both), "");
    }
  }
}

// srun --mpi=pmi2 sets PMI's variables, too; those of an mpirun within the step are others.
TEST(LaunchEnvironmentTest, SlurmSpeaksForItsOwnPmi) {
  Variables step = srun("1", "2", "1", "2");
  step.insert({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  EXPECT_EQ(identify(step, -1, -1).launcher, "srun");
  EXPECT_EQ(identify(step, -1, -1).local_rank, 1);
  step["PMI_SIZE"] = "3";
  EXPECT_EQ(identify(step, -1, -1).launcher, "PMI");
}

TEST(LaunchEnvironmentTest, EachLaunchersImpossibleValuesAreRefusedWithItsName) {
  for (const Told& told : kLaunchers) {
    const Variables impossible[] = {told.set("2", "2", "0", "2"),  told.set("-1", "2", "0", "2"),
                                    told.set("0", "0", "0", "0"),  told.set("0", "2", "2", "2"),
                                    told.set("0", "2", "-1", "2"), told.set("0", "2", "0", "4"),
                                    told.set("0", "2", "1", "2")};
    for (const Variables& variables : impossible)
      EXPECT_THAT(error_of(variables), HasSubstr(std::string("from ") + told.launcher));
  }
}

TEST(LaunchEnvironmentTest, PmiNeedNotSayWhichRankOfTheHost) {
  const LaunchIdentity self = identify({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, -1, -1);
  EXPECT_EQ(self.world_size, 2);
  EXPECT_EQ(self.local_rank, -1);
  EXPECT_EQ(self.local_world_size, -1);
  EXPECT_THAT(error_of({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}}),
              HasSubstr("MPI_LOCALNRANKS unset"));
}

// A batch script, or a shell of salloc: one process, whatever the job asked for.
TEST(LaunchEnvironmentTest, AJobOfSlurmWithoutAStepIsNoLauncher) {
  const Variables batch{{"SLURM_JOB_ID", "17"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}};
  EXPECT_EQ(identify(batch, -1, -1).world_size, 1);
  Variables within = open_mpi("1", "4", "1", "4");
  within.insert(batch.begin(), batch.end());
  EXPECT_EQ(identify(within, -1, -1).rank, 1);
}

TEST(LaunchEnvironmentTest, SlurmCountsTheTasksOfEachNode) {
  const auto local_size = [](const char* tasks, const char* node) {
    return identify(srun("6", "8", "0", tasks, node), -1, -1).local_world_size;
  };
  EXPECT_EQ(local_size("2(x3),1(x2)", "0"), 2);
  EXPECT_EQ(local_size("2(x3),1(x2)", "2"), 2);
  EXPECT_EQ(local_size("2(x3),1(x2)", "3"), 1);
  EXPECT_EQ(local_size("1,7", "1"), 7);
  for (const char* junk : {"", "x", "2(x", "2(x)", "2(x3", "2(x0),8", "2(3)", ",", "2,,2", "2(x3)z", "2(x-1)"})
    EXPECT_THAT(error_of(srun("6", "8", "0", junk, "4")), HasSubstr("SLURM_STEP_TASKS_PER_NODE")) << junk;
  Variables nowhere = srun("0", "8", "0", "4,4");
  nowhere.erase("SLURM_NODEID");
  EXPECT_THAT(error_of(nowhere), HasSubstr("got \"4,4\" and unset"));
  for (const char* node : {"2", "-1", "", "x", "99999999999"})
    EXPECT_THAT(error_of(srun("6", "8", "0", "4(x2)", node)), HasSubstr("SLURM_NODEID")) << node;
}

TEST(LaunchEnvironmentTest, FsdpRendezvousNamesTheSocket) {
  const RendezvousSocket socket = rendezvous_socket({{"FSDP_RENDEZVOUS", "/run/job/socket"}, {"MASTER_PORT", "29500"}},
                                                    {}, "", 7);
  EXPECT_EQ(socket.path, "/run/job/socket");
  EXPECT_FALSE(socket.create_directory);
  EXPECT_THROW(rendezvous_socket({{"FSDP_RENDEZVOUS", "socket"}}, {}, "", 7), InvalidArgument);
  EXPECT_THROW(rendezvous_socket({{"FSDP_RENDEZVOUS", "/run/job/"}}, {}, "", 7), InvalidArgument);
}

RendezvousSocket socket_of(const Variables& variables) {
  return rendezvous_socket(variables, identify(variables, -1, -1), "", 7);
}

// Each of these variables tells one start from another; of a launcher that names no job, MASTER_PORT does.
TEST(LaunchEnvironmentTest, TheJobNamesTheSocketUnderTheUsersFolder) {
  const auto with = [](Variables set, const Variables& more) {
    set.insert(more.begin(), more.end());
    return set;
  };
  const std::pair<Variables, std::vector<const char*>> jobs[] = {
      {with(torchrun("0", "2", "0", "2"),
            {{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "a/b\nc"}}),
       {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
      {with(open_mpi("0", "2", "0", "2"), {{"PMIX_NAMESPACE", "1234567169"}}), {"PMIX_NAMESPACE"}},
      {with(srun("0", "2", "0", "2"), {{"SLURM_JOB_ID", "17"}}),
       {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MASTER_PORT", "29500"}}, {"MASTER_PORT", "MASTER_ADDR"}},
      {{{"MASTER_PORT", "29500"}}, {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
  };
  std::set<std::filesystem::path> seen;
  for (const auto& [job, names] : jobs) {
    const RendezvousSocket socket = socket_of(job);
    EXPECT_TRUE(seen.insert(socket.path).second) << socket.path;
    EXPECT_EQ(socket.path.parent_path(), "/tmp/fsdp-7");
    EXPECT_EQ(socket.path.filename().string().size(), 21U) << socket.path;
    EXPECT_TRUE(socket.create_directory);
    EXPECT_EQ(socket_of(job).path, socket.path);
    for (const char* name : names) {
      Variables other = job;
      other[name] = "3";
      EXPECT_NE(socket_of(other).path, socket.path) << name;
    }
    Variables elsewhere = job;
    elsewhere["TMPDIR"] = "/scratch";
    EXPECT_EQ(socket_of(elsewhere).path.parent_path(), "/scratch/fsdp-7");
  }
  EXPECT_TRUE(socket_of({}).path.empty());
  EXPECT_TRUE(socket_of({{"MASTER_PORT", ""}}).path.empty());
  EXPECT_TRUE(socket_of({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}).path.empty());
}

}  // namespace
}  // namespace fsdp
