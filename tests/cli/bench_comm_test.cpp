// The benchmark's own proof of what it has exchanged: it counts what a broken exchange got wrong.
#include "cli/bench_comm.h"

#include <atomic>

#include <gtest/gtest.h>

#include <fsdp/testing.h>

namespace fsdp {
namespace {

std::int64_t wrong_with(const std::vector<std::string>& operations, const FaultPlan& faults) {
  std::atomic<std::int64_t> wrong{-1};
  testing::internal::CaptureStdout();
  run_ranks(3,
            [&](const Context& context) {
              const std::int64_t own = bench_comm(
                  context, {.operations = operations, .begin = 4096, .end = 4096, .iterations = 2});
              if (context.is_main()) wrong = own;
            },
            {.faults = faults});
  testing::internal::GetCapturedStdout();
  return wrong;
}

TEST(BenchCommTest, CountsNothingWhereAllIsWell) { EXPECT_EQ(wrong_with({}, {}), 0); }

TEST(BenchCommTest, CountsOneValueThatIsWrongOnOneRank) {
  for (const std::string operation : kBenchOperations) {
    // The first all_reduce tells how fast memory is copied. One that is wrong is an input of those after it.
    const bool is_all_reduce = operation == "all_reduce";
    const std::int64_t wrong = wrong_with(
        {operation},
        {{.kind = Fault::Kind::kCorruption, .operation = operation, .rank = 1, .after = is_all_reduce ? 1 : 0}});
    EXPECT_GE(wrong, 1) << operation;
    EXPECT_LE(wrong, is_all_reduce ? 4 : 1) << operation;
  }
}

}  // namespace
}  // namespace fsdp
