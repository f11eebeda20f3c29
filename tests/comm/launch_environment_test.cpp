#include "comm/launch_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using testing::HasSubstr;

Variables torchrun(const char* rank, const char* world_size, const char* local_rank, const char* local_world_size) {
  return {
      {"RANK", rank}, {"WORLD_SIZE", world_size}, {"LOCAL_RANK", local_rank}, {"LOCAL_WORLD_SIZE", local_world_size}};
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
    EXPECT_THAT(text, HasSubstr("set all four or none"));
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

TEST(LaunchEnvironmentTest, FsdpRendezvousNamesTheSocket) {
  const RendezvousSocket socket = rendezvous_socket({{"FSDP_RENDEZVOUS", "/run/job/socket"}, {"MASTER_PORT", "29500"}},
                                                    7);
  EXPECT_EQ(socket.path, "/run/job/socket");
  EXPECT_FALSE(socket.create_directory);
  EXPECT_THROW(rendezvous_socket({{"FSDP_RENDEZVOUS", "socket"}}, 7), InvalidArgument);
  EXPECT_THROW(rendezvous_socket({{"FSDP_RENDEZVOUS", "/run/job/"}}, 7), InvalidArgument);
}

TEST(LaunchEnvironmentTest, TorchrunsJobNamesTheSocketUnderTheUsersFolder) {
  const Variables job{{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "a/b\nc"}};
  const RendezvousSocket socket = rendezvous_socket(job, 7);
  EXPECT_EQ(socket.path.parent_path(), "/tmp/fsdp-7");
  EXPECT_EQ(socket.path.filename().string().size(), 21U) << socket.path;
  EXPECT_TRUE(socket.create_directory);
  EXPECT_EQ(rendezvous_socket(job, 7).path, socket.path);
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}) {
    Variables other = job;
    other[name] = "3";
    EXPECT_NE(rendezvous_socket(other, 7).path, socket.path) << name;
  }
  Variables elsewhere = job;
  elsewhere["TMPDIR"] = "/scratch";
  EXPECT_EQ(rendezvous_socket(elsewhere, 7).path.parent_path(), "/scratch/fsdp-7");
  EXPECT_TRUE(rendezvous_socket({}, 7).path.empty());
}

}  // namespace
}  // namespace fsdp
