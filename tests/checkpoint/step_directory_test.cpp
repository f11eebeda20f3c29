#include "checkpoint/step_directory.h"

#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"

namespace fsdp {
namespace {

TEST(StepDirectoryTest, NamesAStepWithSixDigitsOrMore) {
  EXPECT_EQ(step_name(0), "step-000000");
  EXPECT_EQ(step_name(120), "step-000120");
  EXPECT_EQ(step_name(12345678), "step-12345678");
  for (const std::int64_t step : {0L, 120L, 999999L, 12345678L}) EXPECT_EQ(step_of(step_name(step)), step);
}

TEST(StepDirectoryTest, TakesNoOtherNameForAStep) {
  for (const char* name : {"", "step-", "step-120", "step-0000120", "step--00001", "step-+00001", "step-000120 ",
                           "step-000120.tmp-0123456789abcdef", "Step-000120", "step-99999999999999999999", "latest"}) {
    EXPECT_EQ(step_of(name), std::nullopt) << name;
  }
}

TEST(StepDirectoryTest, TellsTemporaryNames) {
  EXPECT_EQ(temporary_name(7, "0123456789abcdef"), "step-000007.tmp-0123456789abcdef");
  EXPECT_TRUE(is_temporary("step-000007.tmp-0123456789abcdef"));
  for (const char* name : {"step-000007", "step-000007.tmp-", "step-000007.tmp-0123456789abcdeg",
                           "step-7.tmp-0123456789abcdef", "x.tmp-0123456789abcdef"}) {
    EXPECT_FALSE(is_temporary(name)) << name;
  }
}

TEST(StepDirectoryTest, FindsTheNewestStepThatHasAManifest) {
  const TempDir dir;
  FileSystem system;
  EXPECT_EQ(newest_step(system, dir / "missing"), std::nullopt);
  EXPECT_EQ(newest_step(system, dir.path()), std::nullopt);
  for (const char* name : {"step-000009", "step-000010", "step-1000000", "step-000011.tmp-0123456789abcdef", "other"}) {
    std::filesystem::create_directory(dir / name);
  }
  for (const char* name : {"step-000009", "step-000010", "step-000011.tmp-0123456789abcdef", "other"}) {
    write_file(dir / name / "manifest.json", "{}");
  }
  write_file(dir / "step-000012", "a file where a directory is expected");
  EXPECT_EQ(newest_step(system, dir.path()), 10);
}

}  // namespace
}  // namespace fsdp
