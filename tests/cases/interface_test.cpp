// One rank is a world like any other.
#include <gtest/gtest.h>

#include <cstdlib>

#include <ATen/ATen.h>

#include <fsdp/testing.h>

#include "tests/cases/case_support.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

constexpr std::int64_t kWidth = 14;
constexpr int kMicroBatches = 3;

void train_accumulated(Session& session, int first, int count) {
  for (int step = first; step < first + count; ++step) {
    const std::string when = "step " + std::to_string(step);
    for (int micro_batch = 0; micro_batch < kMicroBatches; ++micro_batch) {
      const Batch batch = session.part(
          rows(12, kWidth, kWidth, static_cast<std::uint64_t>(600 + kMicroBatches * step + micro_batch)));
      const at::Tensor loss = session.model().loss(batch.input, batch.target);
      loss.backward();
      session.see_loss(when + ", micro-batch " + std::to_string(micro_batch), loss);
    }
    session.see_gradients(when);
    const double norm = session.step({.max_grad_norm = 0.05});
    EXPECT_GT(norm, 0.05) << "nothing was clipped";
    session.see(when + ": norm", at::scalar_tensor(norm, at::kDouble));
    session.see_parameters(when);
  }
}

// A program of one rank that nobody launched.
class C73OneRank : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID"})
      ::unsetenv(name);
  }

  Scenario scenario(std::function<void(Session&)> script) const {
    return {.make_model = seeded<StackModel>(4, kWidth),
            .script = std::move(script),
            .units = units<Linear>(),
            .optimizer = AdamW{.lr = 1e-2}};
  }
  // Training that takes up in the middle; the reference trains the first steps itself.
  Scenario resumed(const std::filesystem::path& dir) const {
    return scenario([dir](Session& session) {
      if (session.engine() != nullptr) {
        EXPECT_EQ(session.engine()->resume(dir), 3);
      } else {
        train_accumulated(session, 0, 3);
        session.seen().clear();
      }
      train_accumulated(session, 3, 3);
    });
  }
  Scenario saving(const std::filesystem::path& dir) const {
    return scenario([dir](Session& session) {
      train_accumulated(session, 0, 3);
      session.engine()->save(dir / "runs");
      session.engine()->consolidate(dir / "model.safetensors");
    });
  }
  TempDir dir_;
};

// C73: with one rank and no launcher all of the interface is there and equals plain LibTorch: train, accumulate, clip,
// save and load in both forms, and go on at two ranks. A world of one as a special case in each function would have
// holes.
TEST_F(C73OneRank, TrainsAccumulatesAndClipsLikePlainLibTorch) {
  const Context context = init();
  ASSERT_EQ(context.world_size(), 1);
  const Scenario training = scenario([](Session& session) { train_accumulated(session, 0, 5); });
  expect_same_seen(run_sharded(training, context), run_plain(training));
}

TEST_F(C73OneRank, SavesAndLoadsBothForms) {
  const Context context = init();
  Scenario training = scenario([&](Session& session) {
    train_accumulated(session, 0, 2);
    session.save_and_restart(dir_ / "runs");
    train_accumulated(session, 2, 2);
  });
  expect_same_seen(run_sharded(training, context), run_plain(training));
  training.script = [&](Session& session) {
    train_accumulated(session, 0, 2);
    session.consolidate_and_restart(dir_ / "model.safetensors");
    train_accumulated(session, 2, 2);
  };
  training.optimizer = SGD{.lr = 0.05};
  expect_same_seen(run_sharded(training, context), run_plain(training));
}

TEST_F(C73OneRank, IsResumedAtOtherWorldSizes) {
  run_sharded(saving(dir_.path()), init());
  expect_equals_reference(resumed(dir_ / "runs"), {1, 2, 3});
}

TEST_F(C73OneRank, ResumesWhatTwoRanksSaved) {
  run_sharded(saving(dir_.path()), 2);
  const Scenario training = resumed(dir_ / "runs");
  expect_same_seen(run_sharded(training, init()), run_plain(training));
}

TEST_F(C73OneRank, WritesTheFileThatTwoRanksWouldAndTheyLoad) {
  run_sharded(saving(dir_.path()), init());
  const Scenario loading = scenario([&](Session& session) {
    if (session.engine() != nullptr) {
      session.engine()->load_consolidated(dir_ / "model.safetensors");
    } else {
      train_accumulated(session, 0, 3);
      session.seen().clear();
    }
    session.see_parameters("loaded");
  });
  expect_equals_reference(loading, {1, 2});
}

// Full shard at one rank pages as it does at four: nothing is kept, nothing is quietly something else.
TEST_F(C73OneRank, ShardsAndPagesLikeAnyOther) {
  const Context context = init();
  Scenario training = scenario([](Session& session) {
    train_accumulated(session, 0, 3);
    const Batch batch = session.part(rows(12, kWidth, kWidth, 650));
    session.model().loss(batch.input, batch.target).backward();
    session.step();
    EXPECT_EQ(resident_parameter_bytes(session.model()), 0U);
    const Plan plan = session.engine()->plan();
    EXPECT_EQ(plan.world_size, 1);
    EXPECT_EQ(plan.units.size(), 4U);
    EXPECT_EQ(plan.slots, 3);
    EXPECT_FALSE(plan.timeline.empty());
    EXPECT_EQ(session.engine()->memory().overflows, 0);
  });
  run_sharded(training, context);
}

}  // namespace
}  // namespace fsdp::testing
