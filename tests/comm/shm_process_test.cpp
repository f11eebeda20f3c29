// How the processes of one host meet and map memory: who is missing, stale and taken sockets, nothing left behind.
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

#include "tests/comm/rank_processes.h"

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::IsEmpty;

class ShmProcessTest : public testing::Test {
 protected:
  std::filesystem::path socket() const { return folder_.path() / "rendezvous"; }

  // Starts ranks 0..world_size-1, child r is rank r.
  void start_all(int world_size, const std::function<std::string()>& body) {
    for (int rank = 0; rank < world_size; ++rank) processes_.start_rank(rank, world_size, socket(), body);
  }

  PrivateFolder folder_;
  RankProcesses processes_;
};

TEST_F(ShmProcessTest, OneRankNeedsNoLauncherAndNoSocket) {
  const int child = processes_.start({}, [] {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FSDP_RENDEZVOUS", "MASTER_PORT",
                             "PMI_RANK", "PMI_SIZE", "SLURM_STEP_ID"})
      ::unsetenv(name);
    Context context = init();
    return context.backend() + " " + std::to_string(context.world_size()) + " " + std::to_string(context.mean(3.5));
  });
  EXPECT_EQ(processes_.outcome(child), "shm 1 3.500000");
}

// PMI names no job, and not always which ranks are on this host: they are where they meet.
TEST_F(ShmProcessTest, PmiAndAPortBringRanksTogether) {
  for (int rank = 0; rank < 2; ++rank) {
    processes_.start(
        {{"PMI_RANK", std::to_string(rank)}, {"PMI_SIZE", "2"}, {"MASTER_PORT", "29518"}, {"TMPDIR", folder_.path()}},
        [] {
          for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) ::unsetenv(name);
          const Context context = init();
          return std::to_string(context.local_rank()) + " of " + std::to_string(context.local_world_size()) +
                 ", mean " + std::to_string(context.mean(context.rank()));
        });
  }
  EXPECT_EQ(processes_.outcome(0), "0 of 2, mean 0.500000");
  EXPECT_EQ(processes_.outcome(1), "1 of 2, mean 0.500000");
}

TEST_F(ShmProcessTest, TorchrunsVariablesAloneBringRanksTogether) {
  for (int rank = 0; rank < 2; ++rank) {
    processes_.start({{"RANK", std::to_string(rank)},
                      {"WORLD_SIZE", "2"},
                      {"LOCAL_RANK", std::to_string(rank)},
                      {"LOCAL_WORLD_SIZE", "2"},
                      {"MASTER_ADDR", "localhost"},
                      {"MASTER_PORT", "29517"},
                      {"TMPDIR", folder_.path()}},
                     [] {
                       ::unsetenv("FSDP_RENDEZVOUS");
                       Context context = init();
                       return std::to_string(context.mean(context.rank()));
                     });
  }
  EXPECT_EQ(processes_.outcome(0), "0.500000");
  EXPECT_EQ(processes_.outcome(1), "0.500000");
  EXPECT_EQ(folder_.entries(), std::vector<std::string>{"fsdp-" + std::to_string(::geteuid())});
}

TEST_F(ShmProcessTest, AMissingRankIsNamedToAllThatCame) {
  const auto body = [] {
    init({.timeout = 500ms});
    return std::string("returned");
  };
  for (const int rank : {0, 2}) processes_.start_rank(rank, 4, socket(), body);
  for (const int child : {0, 1})
    EXPECT_THAT(processes_.outcome(child), HasSubstr("2 of 4 ranks came within 0.5 s, missing: rank 1, 3"));
  EXPECT_THAT(folder_.entries(), IsEmpty());
}

TEST_F(ShmProcessTest, AMissingRankZeroIsNamed) {
  processes_.start_rank(1, 2, socket(), [] {
    init({.timeout = 200ms});
    return std::string("returned");
  });
  EXPECT_THAT(processes_.outcome(0), HasSubstr("rank 1 met no rank 0 within 0.2 s"));
}

TEST_F(ShmProcessTest, ARankThatDiesBeforeAllAreThereIsNamed) {
  const auto body = [] {
    init();
    return std::string("returned");
  };
  for (const int rank : {0, 1, 2}) processes_.start_rank(rank, 4, socket(), body);
  std::this_thread::sleep_for(300ms);
  processes_.kill(1);
  for (const int child : {0, 2})
    EXPECT_THAT(processes_.outcome(child),
                HasSubstr("rank 1 (pid " + std::to_string(processes_.pid(1)) + ") ended before all ranks were there"));
  EXPECT_THAT(folder_.entries(), IsEmpty());
}

TEST_F(ShmProcessTest, ASocketLeftByAKilledRankZeroIsTakenOver) {
  const auto body = [] { return std::to_string(init().mean(1)); };
  for (const int rank : {0, 1}) processes_.start_rank(rank, 3, socket(), body);
  std::this_thread::sleep_for(300ms);
  processes_.kill(0);
  EXPECT_THAT(processes_.outcome(1), HasSubstr("rank 0 ended while rank 1 waited"));
  EXPECT_EQ(processes_.outcome(0), "killed");
  ASSERT_EQ(folder_.entries(), std::vector<std::string>{"rendezvous"}) << "nothing stale to take over";
  // Rank 1 first, so that it meets the stale socket as well.
  const int second = processes_.start_rank(1, 2, socket(), body);
  std::this_thread::sleep_for(50ms);
  const int first = processes_.start_rank(0, 2, socket(), body);
  EXPECT_EQ(processes_.outcome(first), "1.000000");
  EXPECT_EQ(processes_.outcome(second), "1.000000");
  EXPECT_THAT(folder_.entries(), IsEmpty());
}

TEST_F(ShmProcessTest, TheSocketOfALivingJobIsNotTaken) {
  const auto body = [] {
    init();
    return std::string("returned");
  };
  processes_.start_rank(0, 2, socket(), body);
  std::this_thread::sleep_for(200ms);
  const int other = processes_.start_rank(0, 2, socket(), body);
  EXPECT_THAT(processes_.outcome(other), HasSubstr("rank 0 of another job listens there"));
  const int guest = processes_.start_rank(1, 2, socket(), body);
  EXPECT_EQ(processes_.outcome(0), "returned");
  EXPECT_EQ(processes_.outcome(guest), "returned");
}

TEST_F(ShmProcessTest, AFileInThePlaceOfTheSocketIsRefusedAndKept) {
  std::ofstream(socket()) << "precious";
  processes_.start_rank(0, 2, socket(), [] {
    init();
    return std::string("returned");
  });
  EXPECT_THAT(processes_.outcome(0), HasSubstr("expected a socket or nothing, got another kind of file"));
  EXPECT_EQ(folder_.entries(), std::vector<std::string>{"rendezvous"});
}

TEST_F(ShmProcessTest, TwoProcessesOfOneRankAreNamed) {
  const auto body = [] {
    init();
    return std::string("returned");
  };
  for (const int rank : {0, 1, 1}) processes_.start_rank(rank, 3, socket(), body);
  for (const int child : {0, 1, 2})
    EXPECT_THAT(processes_.outcome(child), HasSubstr("two processes say that they are rank 1"));
}

TEST_F(ShmProcessTest, RanksOfDifferentWorldSizesAreRefused) {
  const auto body = [] {
    init();
    return std::string("returned");
  };
  processes_.start_rank(0, 2, socket(), body);
  processes_.start_rank(1, 3, socket(), body);
  for (const int child : {0, 1})
    EXPECT_THAT(processes_.outcome(child),
                HasSubstr("world size 2 and a rank in [1, 2), as rank 0 has it, got world size 3 and rank 1 from pid"));
}

// Connects to rank 0 and says what no rank would.
void talk_nonsense(const std::filesystem::path& path) {
  const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::send(fd, "GET / HTTP/1.0", 14, 0), 14);
  ::close(fd);
}

TEST_F(ShmProcessTest, AStrangerAtTheSocketDoesNotDisturb) {
  const auto body = [] {
    init();
    return std::string("returned");
  };
  processes_.start_rank(0, 2, socket(), body);
  std::this_thread::sleep_for(200ms);
  talk_nonsense(socket());
  processes_.start_rank(1, 2, socket(), body);
  for (const int child : {0, 1}) EXPECT_EQ(processes_.outcome(child), "returned");
}

TEST_F(ShmProcessTest, AFolderThatOthersMayEnterIsRefused) {
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0755), 0);
  start_all(2, [] {
    init();
    return std::string("returned");
  });
  for (const int child : {0, 1}) EXPECT_THAT(processes_.outcome(child), HasSubstr("and mode 700, got owner"));
}

TEST_F(ShmProcessTest, InitRefusesWhatItCannotDo) {
  const auto error_of = [&](const InitOptions& options, std::map<std::string, std::string> variables) {
    return processes_.outcome(processes_.start(variables, [&options] {
      if (::getenv("FSDP_RENDEZVOUS") == nullptr) ::unsetenv("MASTER_PORT");
      init(options);
      return std::string("returned");
    }));
  };
  EXPECT_THAT(error_of({.backend = "gloo"}, {}), HasSubstr("expected auto, shm or tcp, got \"gloo\""));
  EXPECT_THAT(error_of({.backend = "thread"}, {}), HasSubstr("run_ranks in <fsdp/testing.h>"));
  EXPECT_THAT(error_of({.timeout = 0ms}, {}), HasSubstr("expected a positive time, got 0 ms"));
  EXPECT_THAT(error_of({}, {{"FSDP_TIMEOUT", "0.0"}}), HasSubstr("expected a positive time, got 0 ms"));
  for (const auto silence : {-1ms, 1ms, 2999ms})
    EXPECT_THAT(
        error_of({.silence = silence}, {}),
        HasSubstr(fmt::format("expected at least 3000 ms, as a healthy rank may be late by a beat or two, or 0 for "
                              "never, got {} ms",
                              silence.count())));
  for (const char* text : {"", "x", "-1", "1s", "nan", "1e99"})
    EXPECT_THAT(error_of({}, {{"FSDP_SILENCE", text}}),
                HasSubstr("FSDP_SILENCE: expected seconds, as in 600 or 0.5, got"));
  EXPECT_THAT(error_of({.rank = 0, .world_size = 2}, {}), HasSubstr("set FSDP_RENDEZVOUS to the path"));
  EXPECT_THAT(error_of({.rank = 0, .world_size = 129}, {}), HasSubstr("at most 128 ranks, got 129"));
  const std::map<std::string, std::string> two_hosts{
      {"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}};
  EXPECT_THAT(error_of({.backend = "shm"}, two_hosts),
              HasSubstr("expected all ranks on one host, got 2 of 4 here (from torchrun)"));
  EXPECT_THAT(error_of({}, two_hosts), HasSubstr("does not know where rank 0 is: set MASTER_ADDR"));
}

}  // namespace
}  // namespace fsdp
