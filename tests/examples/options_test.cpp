#include "examples/train_gpt/options.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gpt {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

CommandLine parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "train_gpt");
  return parse_command_line(static_cast<int>(arguments.size()), arguments.data());
}

std::string refusal(const std::vector<const char*>& arguments) {
  try {
    parse(arguments);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no UsageError";
}

TEST(OptionsTest, DefaultsCanBeMeant) {
  const auto options = parse({}).options;
  EXPECT_EQ(options.strategy, "full_shard");
  EXPECT_EQ(options.last_step(), options.steps);
  EXPECT_EQ(options.data.size(), 1u);
}

TEST(OptionsTest, HelpNamesEveryFlag) {
  const auto help = parse({"--help"}).help;
  for (const char* flag : {"--data",        "--strategy", "--shard-group", "--precision",  "--layers", "--width",
                           "--heads",       "--context",  "--batch",       "--steps",      "--lr",     "--seed",
                           "--save-every",  "--out",      "--resume",      "--stop-after", "--plain",  "--sample",
                           "--consolidate", "--load",     "--threads",     "--prefetch"}) {
    EXPECT_THAT(help, HasSubstr(flag));
  }
}

TEST(OptionsTest, DataTakesSeveralPaths) {
  EXPECT_EQ(parse({"--data", "a", "b"}).options.data, (std::vector<fs::path>{"a", "b"}));
}

TEST(OptionsTest, TheLastOfARepeatedFlagCounts) { EXPECT_EQ(parse({"--batch", "6", "--batch", "3"}).options.batch, 3); }

TEST(OptionsTest, StopAfterEndsBeforeTheSchedule) {
  EXPECT_EQ(parse({"--steps", "100", "--stop-after", "40"}).options.last_step(), 40);
  EXPECT_EQ(parse({"--steps", "100", "--stop-after", "400"}).options.last_step(), 100);
}

struct BadLine {
  std::vector<const char*> arguments;
  std::string named, remedy;
};

void PrintTo(const BadLine& line, std::ostream* stream) { *stream << ::testing::PrintToString(line.arguments); }

class BadOptionsTest : public ::testing::TestWithParam<BadLine> {};

TEST_P(BadOptionsTest, AreRefusedInOneLineThatNamesThemAndTheRemedy) {
  const auto message = refusal(GetParam().arguments);
  EXPECT_THAT(message, AllOf(HasSubstr(GetParam().named), HasSubstr(GetParam().remedy)));
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(
    OptionsTest, BadOptionsTest,
    ::testing::Values(
        BadLine{{"--stepz", "3"}, "--stepz is not a flag", "see train_gpt --help"},
        BadLine{{"--steps", "many"}, "--steps", "see train_gpt --help"},
        BadLine{{"--steps", "0"}, "--steps", "at least 1"}, BadLine{{"--batch", "-2"}, "--batch", "at least 1"},
        BadLine{{"--layers", "0"}, "--layers", "at least 1"}, BadLine{{"--context", "0"}, "--context", "at least 1"},
        BadLine{{"--sample", "-1"}, "--sample", "at least 0"}, BadLine{{"--seed", "-1"}, "--seed", "at least 0"},
        BadLine{{"--prefetch", "-1"}, "--prefetch", "at least 0"}, BadLine{{"--lr", "nan"}, "--lr", "positive"},
        BadLine{{"--width", "100", "--heads", "3"}, "--heads 3 does not divide --width 100", "multiple"},
        BadLine{{"--strategy", "ddp"}, "--strategy ddp", "full_shard"},
        BadLine{{"--precision", "fp8"}, "--precision fp8", "bf16"},
        BadLine{{"--shard-group", "-1"}, "--shard-group", "at least 0"}, BadLine{{"--resume"}, "--resume", "--out"},
        BadLine{{"--plain", "--out", "x"}, "--plain", "--out"},
        BadLine{{"--load", "nowhere.safetensors"}, "nowhere.safetensors", "--consolidate"},
        BadLine{{"--resume", "--out", "nowhere"}, "nowhere", "start without --resume"},
        BadLine{{"--consolidate", "nowhere/a.safetensors"}, "nowhere/a.safetensors", "make nowhere first"}));

TEST(OptionsTest, OutThatHoldsCheckpointsNeedsResume) {
  const auto folder = fs::path(::testing::TempDir()) / "options_test_out";
  fs::create_directories(folder / "step-000010");
  const auto path = folder.string();
  EXPECT_THAT(refusal({"--out", path.c_str()}), AllOf(HasSubstr(path), HasSubstr("--resume")));
  EXPECT_TRUE(parse({"--out", path.c_str(), "--resume"}).options.resume);
  fs::remove_all(folder);
}

TEST(OptionsTest, OutThatIsAFileIsRefused) {
  const auto file = fs::path(::testing::TempDir()) / "options_test_file";
  std::ofstream(file) << "x";
  const auto path = file.string();
  EXPECT_THAT(refusal({"--out", path.c_str()}), HasSubstr("is a file"));
  fs::remove(file);
}

TEST(OptionsTest, BatchThatTheRanksDoNotDivideIsRefusedWithOneThatTheyDo) {
  const auto options = parse({"--batch", "10"}).options;
  EXPECT_NO_THROW(check_world_size(options, 5));
  try {
    check_world_size(options, 4);
    FAIL() << "4 ranks cannot share 10 rows";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("--batch 10"), HasSubstr("4 ranks"), HasSubstr("e.g. 12")));
  }
}

TEST(OptionsTest, PlainTrainingIsRefusedOnTwoRanks) {
  EXPECT_THROW(check_world_size(parse({"--plain"}).options, 2), UsageError);
}

TEST(OptionsTest, LearningRateWarmsUpThenFallsToATenth) {
  const auto options = parse({"--steps", "1000", "--lr", "0.01"}).options;
  EXPECT_NEAR(learning_rate(options, 0), 0.01 / 50, 1e-12);
  EXPECT_NEAR(learning_rate(options, 49), 0.01, 1e-12);
  EXPECT_NEAR(learning_rate(options, 525), 0.0055, 1e-12);
  EXPECT_NEAR(learning_rate(options, 999), 0.001, 1e-6);
}

}  // namespace
}  // namespace gpt
