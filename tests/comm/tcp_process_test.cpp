// How processes meet over TCP: who is missing, ports, files, secrets, and strangers.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

#include "comm/meeting_file.h"
#include "tests/comm/rank_processes.h"

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

using Variables = std::map<std::string, std::string>;

std::string meet_and_average() { return std::to_string(init().mean(1)); }

class TcpProcessTest : public testing::Test {
 protected:
  int start(int rank, int world_size, const std::function<std::string()>& body = meet_and_average,
            const Variables& more = {}) {
    Variables variables = job_.variables("tcp", rank, world_size);
    for (const auto& [name, value] : more) variables[name] = value;
    return processes_.start(variables, body);
  }
  std::string outcome(int child) { return processes_.outcome(child); }
  std::string here() const { return "127.0.0.1:" + std::to_string(job_.port()); }

  PrivateFolder folder_;
  JobPlace job_{folder_.path()};
  RankProcesses processes_;
};

std::string with_short_timeout() {
  init({.timeout = 500ms});
  return "returned";
}

TEST_F(TcpProcessTest, RanksAreOfOneHostWhereverTheyMeet) {
  const auto body = [] {
    const Context context = init();
    return context.backend() + " " + context.backend_reason() + " " + std::to_string(context.local_rank()) + "/" +
           std::to_string(context.local_world_size());
  };
  for (const int rank : {0, 1, 2}) start(rank, 3, body);
  for (const int rank : {0, 1, 2})
    EXPECT_EQ(outcome(rank), "tcp FSDP_BACKEND; rank 0 at " + here() + " " + std::to_string(rank) + "/3");
}

TEST_F(TcpProcessTest, AMissingRankIsNamedToAllThatCame) {
  for (const int rank : {0, 2}) start(rank, 4, with_short_timeout);
  for (const int child : {0, 1})
    EXPECT_THAT(outcome(child), AllOf(HasSubstr("rendezvous at " + here()),
                                      HasSubstr("2 of 4 ranks came within 0.5 s, missing: rank 1, 3")));
}

TEST_F(TcpProcessTest, AMissingRankZeroIsNamed) {
  start(1, 2, with_short_timeout);
  EXPECT_THAT(outcome(0), HasSubstr("rendezvous at " + here() + ": rank 1 met no rank 0 within 0.5 s"));
}

TEST_F(TcpProcessTest, ARankThatDiesBeforeAllAreThereIsNamed) {
  for (const int rank : {0, 1, 2}) start(rank, 4);
  std::this_thread::sleep_for(300ms);
  const std::string victim = "rank 1 (pid " + std::to_string(processes_.pid(1)) + " on ";
  processes_.kill(1);
  for (const int child : {0, 2})
    EXPECT_THAT(outcome(child), AllOf(HasSubstr(victim), HasSubstr("ended before all ranks were there")));
}

TEST_F(TcpProcessTest, RankZeroThatDiesBeforeAllAreThereIsNamed) {
  for (const int rank : {0, 1}) start(rank, 3);
  std::this_thread::sleep_for(300ms);
  processes_.kill(0);
  EXPECT_THAT(outcome(1), HasSubstr("rank 0 ended while rank 1 waited"));
}

TEST_F(TcpProcessTest, APortThatIsTakenNamesItsHolder) {
  const UniqueFd holder = listen_at(resolve("127.0.0.1", static_cast<std::uint16_t>(job_.port())).front());
  start(0, 2);
  EXPECT_THAT(outcome(0), AllOf(HasSubstr("cannot listen at " + here() + ": pid " + std::to_string(::getpid())),
                                HasSubstr("process_test"), HasSubstr("set MASTER_PORT")));
}

TEST_F(TcpProcessTest, AnAddressOfAnotherHostIsNamed) {
  start(0, 2, meet_and_average, {{"MASTER_ADDR", "192.0.2.1"}});
  EXPECT_THAT(outcome(0), HasSubstr("this host has no such address; set MASTER_ADDR to the host of rank 0"));
}

TEST_F(TcpProcessTest, AnotherTokenIsNotLetIn) {
  start(0, 2, with_short_timeout);
  std::this_thread::sleep_for(100ms);
  start(1, 2, with_short_timeout, {{"FSDP_JOB_TOKEN", std::string(64, 'a')}});
  EXPECT_THAT(outcome(1), AllOf(HasSubstr("who listens there is not rank 0 of this job"), HasSubstr("FSDP_JOB_TOKEN")));
  EXPECT_THAT(outcome(0), AllOf(HasSubstr("missing: rank 1 (1 connections without this job's token were turned away")));
}

TEST_F(TcpProcessTest, NoTokenIsRefusedWithTheCommandThatMakesOne) {
  start(0, 2, [] {
    ::unsetenv("FSDP_JOB_TOKEN");
    return meet_and_average();
  });
  EXPECT_THAT(outcome(0), HasSubstr("openssl rand -hex 32"));
}

TEST_F(TcpProcessTest, TwoProcessesOfOneRankAreNamed) {
  for (const int rank : {0, 1, 1}) start(rank, 3);
  for (const int child : {0, 1, 2}) EXPECT_THAT(outcome(child), HasSubstr("two processes say that they are rank 1"));
}

TEST_F(TcpProcessTest, RanksOfDifferentWorldSizesAreRefused) {
  start(0, 2);
  start(1, 3);
  for (const int child : {0, 1})
    EXPECT_THAT(outcome(child),
                HasSubstr("expected world size 2 and a rank in [1, 2), as rank 0 has it, got world size 3 and rank 1"));
}

int number_of(const char* variable, int fallback) {
  const char* text = std::getenv(variable);
  return text == nullptr ? fallback : std::atoi(text);
}

// Nothing, a part of a hello, a hello with a wrong proof, or noise; with any length.
std::vector<std::byte> hostile_bytes(std::mt19937& random) {
  constexpr std::uint64_t kMagic = 0x4673'6470'0001'0001;
  std::vector<std::byte> bytes(random() % 400);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  if (random() % 2 == 0) std::memcpy(bytes.data(), &kMagic, std::min(bytes.size(), sizeof(kMagic)));
  return bytes;
}

// What comes to the port and is not of the job: never believed, never in the way.
TEST_F(TcpProcessTest, StrangersDoNotDisturbTheMeeting) {
  start(0, 2);
  const TcpAddress address = resolve("127.0.0.1", static_cast<std::uint16_t>(job_.port())).front();
  std::mt19937 random(7);
  std::vector<UniqueFd> open;
  const auto deadline = std::chrono::steady_clock::now() + 15s;
  for (int stranger = 0; stranger < number_of("FSDP_TEST_STRANGERS", 2000);) {
    auto socket = connect_to(address, deadline);
    if (!socket) continue;
    ++stranger;
    send_all(*socket, hostile_bytes(random), deadline);
    if (random() % 4 == 0) ::shutdown(socket->get(), SHUT_WR);
    if (random() % 2 == 0) continue;  // closed at once
    open.push_back(std::move(*socket));
    if (open.size() == 900) open.erase(open.begin(), open.begin() + 300);  // more stay than there are places for
  }
  start(1, 2);
  EXPECT_EQ(outcome(0), "1.000000");
  EXPECT_EQ(outcome(1), "1.000000");
}

// The ports of a job on one host cannot be reached from another, as the kernel's table of sockets shows.
TEST_F(TcpProcessTest, RanksOfOneHostListenOnLoopbackAlone) {
  start(0, 3);
  start(1, 3);
  std::string table;
  const std::string listens = fmt::format(":{:04X} 00000000:0000 0A ", job_.port());
  for (const auto end = std::chrono::steady_clock::now() + 10s; std::chrono::steady_clock::now() < end;) {
    std::ostringstream text;
    text << std::ifstream("/proc/net/tcp").rdbuf();
    table = text.str();
    if (table.find(listens) != std::string::npos) break;
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_THAT(table, HasSubstr(" 0100007F" + listens));
  EXPECT_THAT(table, testing::Not(HasSubstr(" 00000000" + listens)));
  start(2, 3);
  for (const int child : {0, 1, 2}) EXPECT_EQ(outcome(child), "1.000000");
}

// Once all are there the port is closed, and each rank listens nowhere.
TEST_F(TcpProcessTest, NobodyListensAfterTheMeeting) {
  const auto body = [] {
    Context context = init();
    int listeners = 0;
    for (int fd = 0; fd < 1024; ++fd) {
      int listens = 0;
      socklen_t bytes = sizeof(listens);
      if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0) listeners += listens;
    }
    context.communicator().barrier();
    return std::to_string(listeners) + " listeners";
  };
  for (const int rank : {0, 1, 2}) start(rank, 3, body);
  for (const int child : {0, 1, 2}) EXPECT_EQ(outcome(child), "0 listeners");
}

class MeetingFileProcessTest : public TcpProcessTest {
 protected:
  int start_at(const std::filesystem::path& file, int rank, int world_size, const std::string& job = "a") {
    return start(
        rank, world_size,
        [file] { return std::to_string(init({.init_method = "file://" + file.string(), .timeout = 5s}).mean(1)); },
        {{"TORCHELASTIC_RUN_ID", job}});
  }
  std::filesystem::path file() const { return folder_.path() / "meet"; }
  void expect_met(std::initializer_list<int> children) {
    for (const int child : children) EXPECT_EQ(outcome(child), "1.000000");
  }
};

TEST_F(MeetingFileProcessTest, BringsRanksTogetherInAnyOrder) {
  start_at(file(), 1, 3);
  std::this_thread::sleep_for(100ms);
  start_at(file(), 0, 3);
  start_at(file(), 2, 3);
  expect_met({0, 1, 2});
}

// A killed job leaves its file; the next one, with or without a launcher that tells them apart, is not led astray.
TEST_F(MeetingFileProcessTest, AStaleFileIsReplaced) {
  const UniqueFd silent = listen_at(resolve("127.0.0.1", 0).front());  // somebody listens where the earlier job did
  for (const char* job : {"a", "b"}) {
    for (const TcpAddress& address : {local_address(silent), *to_numeric_address("127.0.0.1", 1)}) {
      write_meeting_file(file(), {std::to_string(job_.port()) + "/127.0.0.1/" + job + "/", random_token(), {address}});
      const int first = start_at(file(), 1, 2);
      std::this_thread::sleep_for(200ms);
      const int second = start_at(file(), 0, 2);
      expect_met({first, second});
    }
  }
}

TEST_F(MeetingFileProcessTest, OneOfAnotherJobIsNotUsed) {
  start_at(file(), 0, 2, "a");
  std::this_thread::sleep_for(200ms);
  const int stranger = start_at(file(), 1, 2, "b");
  EXPECT_THAT(outcome(stranger), HasSubstr("rendezvous at " + file().string() + ": rank 1 met no rank 0 within 5 s"));
  EXPECT_THAT(outcome(0), HasSubstr("missing: rank 1"));
}

}  // namespace
}  // namespace fsdp
