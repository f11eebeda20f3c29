// `fsdp run` as users meet it: the program itself, with shells as ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <string.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/cli/program_run.h"

namespace fsdp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::MatchesRegex;
using testing::StartsWith;
using testing::UnorderedElementsAre;

constexpr double kEndLimitSeconds = 5;  // what the launcher promises

// Ranks print the pids of their shell and of a program under it, then wait; the pids of all of them.
constexpr const char* kWaitingScript = "sleep 300 & echo pid $$; echo pid $!; wait";

std::vector<pid_t> pids_of(const std::vector<std::string>& lines) {
  std::vector<pid_t> pids;
  for (const auto& line : lines) pids.push_back(std::stoi(line.substr(line.find("pid ") + 4)));
  return pids;
}

bool none_alive(const std::vector<pid_t>& pids) {
  for (const auto pid : pids) {
    if (is_alive(pid)) return false;
  }
  return true;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(RunTest, GivesZeroWhenEveryRankIsGood) {
  const auto result = run_program(shell_job(3, "echo $RANK of $WORLD_SIZE"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(lines_of(result.output), UnorderedElementsAre("[r0] 0 of 3", "[r1] 1 of 3", "[r2] 2 of 3"));
  EXPECT_THAT(result.error_output, IsEmpty());
}

TEST(RunTest, PrefixesStandardErrorApartFromStandardOutput) {
  const auto result = run_program(shell_job(2, "echo out; echo err >&2"));
  EXPECT_THAT(lines_of(result.output), UnorderedElementsAre("[r0] out", "[r1] out"));
  EXPECT_THAT(lines_of(result.error_output), UnorderedElementsAre("[r0] err", "[r1] err"));
}

TEST(RunTest, LeavesTheOutputOfASingleRankAlone) {
  const auto result = run_program(shell_job(1, "printf 'no newline'"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, "no newline");
}

TEST(RunTest, EndsALastLineThatHasNoNewline) {
  EXPECT_THAT(lines_of(run_program(shell_job(2, "printf 'no newline'")).output),
              UnorderedElementsAre("[r0] no newline", "[r1] no newline"));
}

TEST(RunTest, KeepsLongLinesOfSeveralRanksApart) {
  const auto result = run_program(
      shell_job(4, "for i in 1 2 3; do head -c 65536 /dev/zero | tr '\\0' $RANK; echo; done"));
  std::vector<std::string> expected;
  for (int rank = 0; rank < 4; ++rank) {
    expected.insert(expected.end(), 3,
                    "[r" + std::to_string(rank) + "] " + std::string(65536, static_cast<char>('0' + rank)));
  }
  EXPECT_THAT(lines_of(result.output), testing::UnorderedElementsAreArray(expected));
}

TEST(RunTest, GivesTheCodeOfTheFirstRankThatFails) {
  const auto result = run_program(shell_job(4, "[ $RANK = 2 ] && exit 3; exec sleep 300"));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.error_output,
              MatchesRegex("fsdp run: rank 2 \\(pid [0-9]+\\) exited with code 3; the other 3 ranks were ended\n"));
}

TEST(RunTest, LetsTheOtherRanksSayWhatTheySawAndKeepsTheRootCause) {
  const auto result = run_program(shell_job(2, "[ $RANK = 0 ] && exit 7; sleep 0.3; echo rank 0 is gone >&2; exit 9"));
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_THAT(result.error_output,
              AllOf(HasSubstr("[r1] rank 0 is gone"), HasSubstr("rank 0 (pid"), HasSubstr("exited with code 7")));
}

TEST(RunTest, CountsOnlyTheRanksThatStillRan) {
  const auto result = run_program(
      shell_job(3, "[ $RANK = 0 ] && exit 0; [ $RANK = 1 ] && exec sleep 300; sleep 0.5; exit 4"));
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_THAT(result.error_output, HasSubstr("; 1 of the other 2 ranks still ran and were ended"));
}

TEST(RunTest, Gives128AndTheSignalForARankThatWasKilled) {
  const auto result = run_program(shell_job(2, "[ $RANK = 1 ] && kill -KILL $$; exec sleep 300"));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(
      result.error_output,
      MatchesRegex(
          "fsdp run: rank 1 \\(pid [0-9]+\\) was killed by signal 9 \\(SIGKILL\\); the other rank was ended\n"));
}

TEST(RunTest, EndsRanksThatIgnoreTermWithinItsLimit) {
  const auto begin = std::chrono::steady_clock::now();
  ProgramRun run(shell_job(
      3, "trap '' TERM; sleep 300 & echo pid $$; echo pid $!; [ $RANK = 0 ] && exit 5; while :; do wait; done"));
  const auto pids = pids_of(run.wait_for_lines(6));
  const auto result = run.finish();
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_TRUE(none_alive(pids));
  EXPECT_LT(seconds_since(begin), 2 * kEndLimitSeconds);
}

TEST(RunTest, EndsWhatARankLeftInTheBackground) {
  ProgramRun run(shell_job(2, "sleep 300 & echo pid $!"));
  const auto pids = pids_of(run.wait_for_lines(2));
  EXPECT_EQ(run.finish().exit_code, 0);
  EXPECT_TRUE(eventually(kEndLimitSeconds, [&] { return none_alive(pids); }));
}

TEST(RunTest, LeavesNothingBehindWhenItIsKilledItself) {
  ProgramRun run(shell_job(3, std::string("echo dir $FSDP_RENDEZVOUS; ") + kWaitingScript));
  std::vector<std::string> pid_lines, directories;
  for (const auto& line : run.wait_for_lines(9)) {
    const auto at = line.find("dir ");
    at == std::string::npos ? pid_lines.push_back(line) : directories.push_back(line.substr(at + 4));
  }
  const auto pids = pids_of(pid_lines);
  ASSERT_EQ(pids.size(), 6u);
  ASSERT_FALSE(none_alive(pids));
  const auto directory = std::filesystem::path(directories.front()).parent_path();
  ASSERT_TRUE(std::filesystem::exists(directory));

  ASSERT_EQ(::kill(run.pid(), SIGKILL), 0);
  EXPECT_EQ(run.finish().exit_code, 128 + SIGKILL);
  EXPECT_TRUE(eventually(kEndLimitSeconds, [&] { return none_alive(pids); }));
  EXPECT_TRUE(eventually(kEndLimitSeconds, [&] { return !std::filesystem::exists(directory); }));
}

TEST(RunTest, RemovesTheRendezvousDirectoryAtTheEnd) {
  const auto result = run_program(shell_job(1, "touch $FSDP_RENDEZVOUS && printf %s $FSDP_RENDEZVOUS"));
  ASSERT_THAT(result.output, HasSubstr("/rendezvous"));
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(result.output).parent_path()));
}

class RunSignalTest : public testing::TestWithParam<int> {};

TEST_P(RunSignalTest, IsPassedOnAndDecidesTheExitCode) {
  const std::string script = "trap 'echo got it; exit 0' INT TERM HUP; echo ready; while :; do sleep 0.05; done";
  ProgramRun run(shell_job(2, script));
  run.wait_for_lines(2);
  ASSERT_EQ(::kill(run.pid(), GetParam()), 0);
  const auto result = run.finish();
  EXPECT_EQ(result.exit_code, 128 + GetParam());
  EXPECT_THAT(lines_of(result.output), UnorderedElementsAre("[r0] ready", "[r1] ready", "[r0] got it", "[r1] got it"));
  EXPECT_THAT(result.error_output, HasSubstr(std::string("fsdp run: SIG") + ::sigabbrev_np(GetParam()) +
                                             " received; all ranks were ended\n"));
}

INSTANTIATE_TEST_SUITE_P(RunTest, RunSignalTest, testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& test) { return std::string(::sigabbrev_np(test.param)); });

TEST(RunTest, KillsRanksThatIgnoreAForwardedSignal) {
  const auto begin = std::chrono::steady_clock::now();
  ProgramRun run(shell_job(2, "trap '' TERM; echo pid $$; while :; do sleep 0.1; done"));
  const auto pids = pids_of(run.wait_for_lines(2));
  ASSERT_EQ(::kill(run.pid(), SIGTERM), 0);
  EXPECT_EQ(run.finish().exit_code, 128 + SIGTERM);
  EXPECT_TRUE(none_alive(pids));
  EXPECT_LT(seconds_since(begin), 2 * kEndLimitSeconds);
}

TEST(RunTest, KillsAtOnceOnASecondSignal) {
  ProgramRun run(shell_job(2, "trap 'echo first' TERM; echo ready; while :; do sleep 0.05; done"));
  run.wait_for_lines(2);
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_EQ(::kill(run.pid(), SIGTERM), 0);
  run.wait_for_lines(4);
  ASSERT_EQ(::kill(run.pid(), SIGTERM), 0);
  EXPECT_EQ(run.finish().exit_code, 128 + SIGTERM);
  EXPECT_LT(seconds_since(begin), 2.5) << "the first signal's grace is 3 s";
}

TEST(RunTest, OutlivesAHangUpThatItWasToldToIgnore) {
  struct sigaction ignore {
  }, before{};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGHUP, &ignore, &before);
  ProgramRun run(shell_job(2, "echo ready; sleep 1; echo done"));
  ::sigaction(SIGHUP, &before, nullptr);
  run.wait_for_lines(2);
  ASSERT_EQ(::kill(run.pid(), SIGHUP), 0);
  EXPECT_EQ(run.finish().exit_code, 0);
}

TEST(RunTest, EndsInGoodOrderWhenNobodyReadsItsOutput) {
  const std::string ranks = "trap 'echo ended >&2; exit 0' TERM; while :; do echo line; sleep 0.01; done";
  const auto result = run_program(
      shell_job(1, "{ " FSDP_PROGRAM " run -n 2 -- sh -c \"" + ranks + "\"; echo code $? >&2; } | head -n 1"));
  EXPECT_THAT(lines_of(result.error_output),
              testing::IsSupersetOf({"[r0] ended", "[r1] ended", "code 141",
                                     "fsdp run: cannot write output: Broken pipe; all ranks were ended"}));
}

TEST(RunTest, GivesRanksAnEmptyStandardInput) { EXPECT_EQ(run_program(shell_job(2, "cat; exit $?")).exit_code, 0); }

TEST(RunTest, KeepsTheUsersThreadCount) {
  EXPECT_EQ(run_program(shell_job(1, "printf %s $OMP_NUM_THREADS"), {{"OMP_NUM_THREADS", "7"}}).output, "7");
}

TEST(RunTest, PassesArgumentsOnAsTheyAre) {
  const auto result = run_program({"run", "-n", "1", "--", "/usr/bin/printf", "<%s>", "--help", "", "a b", "--"});
  EXPECT_EQ(result.output, "<--help><><a b><-->");
}

struct UsageCase {
  std::string name;
  std::vector<std::string> arguments;
  std::string named, remedy;
};

void PrintTo(const UsageCase& usage, std::ostream* stream) { *stream << usage.name; }

class UsageErrorTest : public testing::TestWithParam<UsageCase> {};

TEST_P(UsageErrorTest, IsOneLineWithTheRemedyAndCodeTwo) {
  const auto result = run_program(GetParam().arguments);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, IsEmpty());
  EXPECT_EQ(lines_of(result.error_output).size(), 1u);
  EXPECT_THAT(result.error_output,
              AllOf(StartsWith("fsdp"), HasSubstr(GetParam().named), HasSubstr(GetParam().remedy)));
}

INSTANTIATE_TEST_SUITE_P(
    RunTest, UsageErrorTest,
    testing::Values(
        UsageCase{"NoSubcommand", {}, "expected a subcommand", "--help"},
        UsageCase{"UnknownSubcommand", {"frob"}, "frob", "--help"},
        UsageCase{"NoRanks", {"run", "--", "true"}, "--ranks is required", "--help"},
        UsageCase{"ZeroRanks", {"run", "-n", "0", "--", "true"}, "-n 0", "from 1 to 1024"},
        UsageCase{"RanksNotANumber", {"run", "-n", "2x", "--", "true"}, "-n 2x", "from 1 to 1024"},
        UsageCase{"TooManyRanks", {"run", "-n", "99999999999", "--", "true"}, "-n 99999999999", "from 1 to 1024"},
        UsageCase{"NoSeparator", {"run", "-n", "2"}, "no program", "name it after --"},
        UsageCase{"NothingAfterSeparator", {"run", "-n", "2", "--"}, "no program", "name it after --"},
        UsageCase{"ProgramBeforeSeparator", {"run", "-n", "2", "true"}, "true", "go after --"},
        UsageCase{"UnknownFlag", {"run", "-n", "2", "--nodes", "3", "--", "true"}, "--nodes", "go after --"},
        UsageCase{"UnknownBackend", {"run", "-n", "2", "--backend", "smoke", "--", "true"}, "smoke", "shm"},
        UsageCase{"BenchOfWhat", {"bench"}, "subcommand", "--help"},
        UsageCase{"BenchOperation", {"bench", "comm", "--operations", "smoke"}, "smoke", "--help"},
        UsageCase{"BenchSizes", {"bench", "comm", "-b", "9", "-e", "8"}, "got 9 to 8 by 4", "expected sizes from"},
        UsageCase{"BenchRanks", {"bench", "comm", "-n", "0"}, "-n 0", "from 1 to 1024"},
        UsageCase{"DoctorRanks", {"doctor", "-n", "0"}, "--ranks", "--help"},
        UsageCase{"MissingProgram", {"run", "-n", "2", "--", "./no-such-program"}, "./no-such-program", "PATH"},
        UsageCase{"NotExecutable", {"run", "-n", "2", "--", "/etc/passwd"}, "/etc/passwd", "chmod +x"}),
    [](const auto& test) { return test.param.name; });

TEST(ProgramTest, SaysItsVersion) {
  const auto result = run_program({"--version"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, MatchesRegex("fsdp [0-9.]+ \\(LibTorch [0-9.]+\\)\n"));
}

TEST(ProgramTest, MeasuresHowRanksExchangeBytes) {
  for (const char* backend : {"shm", "tcp"}) {
    const auto result = run_program(
        {"bench", "comm", "-n", "3", "--backend", backend, "-b", "8", "-e", "1K", "-f", "16", "-i", "3"});
    EXPECT_EQ(result.exit_code, 0) << result.error_output;
    const auto lines = lines_of(result.output);
    ASSERT_EQ(lines.size(), 3U + 6 * 2) << result.output;
    EXPECT_THAT(lines[0], HasSubstr(std::string("3 rank(s), backend ") + backend));
    EXPECT_THAT(lines[2], HasSubstr("algbw    busbw   #wrong"));
    for (std::size_t i = 3; i < lines.size(); ++i)
      EXPECT_THAT(lines[i], MatchesRegex(" *[a-z_]+ +[0-9]+ +3 +[0-9.]+ +[0-9.]+ +[0-9.]+ +0")) << i;
  }
  const auto json = run_program(
      {"bench", "comm", "-n", "2", "-b", "8", "-e", "8", "-i", "1", "--operations", "gather", "--json"});
  EXPECT_EQ(json.exit_code, 0);
  EXPECT_THAT(json.output, AllOf(StartsWith("{"), HasSubstr("\"operation\": \"gather\""), HasSubstr("\"wrong\": 0")));
}

TEST(ProgramTest, LooksForWhatIsWrongWithThisMachine) {
  const auto good = run_program({"doctor", "-n", "2"}, {{"OMP_NUM_THREADS", "1"}});
  EXPECT_EQ(good.exit_code, 0) << good.output;
  EXPECT_THAT(good.output, AllOf(HasSubstr("OK   exchange_shm: right sums"), HasSubstr("OK   exchange_tcp: right sums"),
                                 HasSubstr("OK   checkpoint_folder: "), HasSubstr(" launch: ")));
  const auto bad = run_program({"doctor", "--json", "--folder", "/no/such/folder"}, {{"RANK", "1"}});
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_THAT(bad.output,
              AllOf(StartsWith("["), HasSubstr("mkdir: No such file or directory"), HasSubstr("WORLD_SIZE unset")));
  EXPECT_EQ(run_program({"doctor"}, {{"NCCL_P2P_DISABLE", "1"}}).exit_code, 0);
  EXPECT_EQ(run_program({"doctor", "--strict"}, {{"NCCL_P2P_DISABLE", "1"}}).exit_code, 1);
}

// Every rank looks, and rank 0 tells what differs.
TEST(ProgramTest, LooksOnEveryRank) {
  const auto same = run_program({"run", "-n", "2", "--doctor"});
  EXPECT_EQ(same.exit_code, 0) << same.output;
  EXPECT_THAT(same.output,
              AllOf(HasSubstr("rank 0 of 2 (from torchrun)"), HasSubstr("nothing differs between the 2 ranks")));
}

TEST(ProgramTest, ExplainsRun) {
  const auto result = run_program({"run", "--help"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, AllOf(HasSubstr("--ranks"), HasSubstr("--backend"), HasSubstr("FSDP_RENDEZVOUS")));
}

}  // namespace
}  // namespace fsdp
