#include "checkpoint/agreement.h"

#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

namespace fsdp {
namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CheckpointError& error) {
    return std::to_string(error.rank()) + ": " + error.what();
  }
  return "";
}

TEST(AgreementTest, GivesEveryRankTheResultsOfAll) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](Context context) {
      const auto texts = on_all_ranks(context.communicator(), "work",
                                      [&] { return std::string(static_cast<std::size_t>(context.rank()) * 3, 'x'); });
      ASSERT_EQ(texts.size(), static_cast<std::size_t>(world));
      for (std::size_t rank = 0; rank < texts.size(); ++rank) EXPECT_EQ(texts[rank], std::string(rank * 3, 'x'));
    });
  }
}

TEST(AgreementTest, ThrowsTheSameOnEveryRankAndStaysUsable) {
  run_ranks(4, [&](Context context) {
    const std::string message = message_of([&] {
      on_all_ranks(context.communicator(), "work", [&]() -> std::string {
        if (context.rank() == 0 || context.rank() == 3) return "fine";
        throw std::runtime_error("broken " + std::to_string(context.rank()));
      });
    });
    EXPECT_EQ(message, "1: work failed on rank 1: broken 1 (failed too: rank 2)");
    EXPECT_EQ(on_rank_zero(context.communicator(), "work", [] { return std::string("good"); }), "good");
  });
}

TEST(AgreementTest, RunsOnRankZeroAlone) {
  run_ranks(3, [&](Context context) {
    bool ran = false;
    const std::string message = message_of([&] {
      on_rank_zero(context.communicator(), "work", [&]() -> std::string {
        ran = true;
        throw CheckpointError("no");
      });
    });
    EXPECT_EQ(ran, context.rank() == 0);
    EXPECT_EQ(message, "0: work failed on rank 0: no");
  });
}

}  // namespace
}  // namespace fsdp
