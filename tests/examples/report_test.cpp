#include "examples/train_gpt/report.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "examples/train_gpt/summary.h"
#include "examples/train_gpt/training_log.h"

namespace gpt {
namespace {

using ::testing::HasSubstr;

std::string printed(bool speaks, const std::function<void(Report&)>& body) {
  ::testing::internal::CaptureStdout();
  Report report(speaks);
  body(report);
  return ::testing::internal::GetCapturedStdout();
}

TEST(ReportTest, BytesAndTimesReadAsPeopleWriteThem) {
  EXPECT_EQ(format_bytes(512), "0.5 KiB");
  EXPECT_EQ(format_bytes(3u << 20), "3.0 MiB");
  EXPECT_EQ(format_bytes(std::size_t{5} << 30), "5.0 GiB");
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(62), "1m02s");
  EXPECT_EQ(format_duration(3720), "1h02m");
}

TEST(ReportTest, OtherRanksAreSilent) {
  EXPECT_EQ(printed(false,
                    [](Report& report) {
                      report.line("hello");
                      report.passage("text");
                    }),
            "");
}

TEST(ReportTest, ProgressAndColourAreForTerminalsOnly) {
  EXPECT_EQ(printed(true,
                    [](Report& report) {
                      report.progress(1, 2, 0.5);
                      report.heading("plan");
                    }),
            "\nplan\n");
}

TEST(ReportTest, PassageHidesWhatATerminalWouldActOn) {
  const auto text = printed(true, [](Report& report) { report.passage("a\x1b[2Jb\xff\nc"); });
  EXPECT_THAT(text, HasSubstr("  | a.[2Jb.\n  | c"));
}

TEST(TrainingLogTest, TakesTheMeanOverRanksAndOverTheSteps) {
  Options options;
  options.steps = 5;
  options.log_every = 2;
  Summary summary;
  const auto text = printed(true, [&](Report& report) {
    TrainingLog log(options, report, summary, [](double value) { return value + 1; });
    for (std::int64_t step = 0; step < 5; ++step) {
      log.add(step, {.loss = static_cast<double>(step), .grad_norm = 1, .seconds = 0.5, .memory_bytes = 1});
    }
  });
  // Lines at step 1 (alone), 2, 4 (mean of 2 and 3) and 5, the last.
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4);
  EXPECT_THAT(text, HasSubstr("loss 3.5000"));
  EXPECT_DOUBLE_EQ(*summary.loss_first, 1.0);
  EXPECT_DOUBLE_EQ(*summary.loss_last, 5.0);
  EXPECT_DOUBLE_EQ(summary.tokens_per_second, 12 * 128 / 0.5);
}

TEST(SummaryTest, IsJsonWithNullForWhatWasNotMeasured) {
  const auto file = std::filesystem::path(::testing::TempDir()) / "summary_test.json";
  write_summary(file, {.world_size = 3, .loss_first = 5.5, .sample = "a\xff"});
  const auto json = nlohmann::json::parse(std::ifstream(file));
  EXPECT_EQ(json.at("world_size"), 3);
  EXPECT_EQ(json.at("loss_first"), 5.5);
  EXPECT_TRUE(json.at("held_out_before").is_null());
  std::filesystem::remove(file);
}

TEST(SummaryTest, FolderThatDoesNotExistIsAnErrorWithItsName) {
  try {
    write_summary("nowhere/summary.json", {});
    FAIL() << "expected an error";
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), HasSubstr("nowhere/summary.json"));
  }
}

}  // namespace
}  // namespace gpt
