// One rank has no memory for the k-th tensor of a step, for every k: all ranks drop the step with that rank's name, nothing of
// it stays allocated, and training goes on as if the step had not been tried.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"
#include "tests/support/counting_allocator.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kWorldSize = 2, kFailing = 1, kTriedStep = 2, kSteps = 4;

struct Stage {
  Strategy strategy;
  bool bf16;
};
void PrintTo(const Stage& stage, std::ostream* out) {
  *out << static_cast<int>(stage.strategy) << (stage.bf16 ? "Bf16" : "Fp32");
}

class AllocationFailureTest : public ::testing::TestWithParam<Stage> {
 protected:
  struct Run {
    std::size_t allocations = 0;  // that rank kFailing made in the step that was tried, until it failed
    std::string text;             // of what rank 0 was told of it
    std::vector<Tensors> parameters{static_cast<std::size_t>(kSteps)};  // after each step
  };

  // Trains with one step more, tried as step kTriedStep, in which allocation `failing` of rank kFailing fails; none if
  // that is a number that is not reached.
  static Run run(std::size_t failing, bool tries) {
    Run result;
    CountingAllocator& allocator = CountingAllocator::install();
    run_ranks(kWorldSize,
              [&](const Context& context) {
                at::set_num_threads(1);
                const auto model = in_turn(make_plain_model);
                ShardOptions options{.units = units_named({"a", "b"}), .strategy = GetParam().strategy};
                if (GetParam().bf16) options.precision.param = at::kBFloat16;
                Engine engine = shard(context, model, options);
                Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
                const auto body = [&](int step) {
                  const Batch batch = part_of(function_batch(step), context.rank(), kWorldSize);
                  const auto dtype = GetParam().bf16 ? at::kBFloat16 : at::kFloat;
                  model->loss(batch.input.to(dtype), batch.target.to(dtype)).backward();
                  optimizer.step();
                };
                for (int step = 0; step < kSteps; ++step) {
                  if (tries && step == kTriedStep) {
                    context.communicator().barrier();
                    const std::size_t before = allocator.live_bytes();
                    context.communicator().barrier();
                    std::string text;
                    try {
                      engine.attempt([&] {
                        if (context.rank() == kFailing) CountingAllocator::fail_at(failing);
                        body(9);
                      });
                    } catch (const StepFailed& error) {
                      text = error.what();
                    }
                    if (context.rank() == kFailing) result.allocations = CountingAllocator::stop_failing();
                    context.communicator().barrier();
                    if (context.is_main()) {
                      result.text = text;
                      EXPECT_LE(allocator.live_bytes(), before);
                    }
                    EXPECT_EQ(engine.memory().held_gradient_bytes, 0U);
                    context.communicator().barrier();
                    if (text.empty()) return;  // it was not reached
                  }
                  engine.attempt([&] { body(step); });
                  EXPECT_EQ(engine.memory().resident_bytes, 0U) << "what the failed step had gathered is pinned";
                  Tensors parameters = parameters_of(*model);
                  if (context.is_main()) result.parameters[static_cast<std::size_t>(step)] = std::move(parameters);
                }
              },
              {.timeout = std::chrono::seconds(20)});
    return result;
  }
};

TEST_P(AllocationFailureTest, OfEveryTensorOfAStepDropsTheStepAndNoMore) {
  const Run reference = run(0, false);
  std::size_t failures = 0;
  for (std::size_t failing = 0;; ++failing) {
    SCOPED_TRACE("allocation " + std::to_string(failing));
    const Run tried = run(failing, true);
    if (tried.text.empty()) {
      EXPECT_EQ(tried.allocations, failing) << "each was the one that fails, once";
      break;
    }
    ++failures;
    EXPECT_THAT(tried.text, AllOf(HasSubstr("rank 1"), HasSubstr("can't allocate memory: you tried to allocate ")));
    for (int step = 0; step < kSteps; ++step) {
      for (const auto& [name, value] : reference.parameters[static_cast<std::size_t>(step)])
        expect_equal(tried.parameters[static_cast<std::size_t>(step)].at(name), value, 0, 0, name);
    }
    if (HasFailure()) break;
  }
  EXPECT_GE(failures, 20U);
}

INSTANTIATE_TEST_SUITE_P(Stages, AllocationFailureTest,
                         ::testing::Values(Stage{Strategy::kFullShard, false}, Stage{Strategy::kShardGradients, false},
                                           Stage{Strategy::kShardOptimizer, false}, Stage{Strategy::kReplicate, false},
                                           Stage{Strategy::kFullShard, true}),
                         [](const auto& tested) { return ::testing::PrintToString(tested.param); });

}  // namespace
}  // namespace fsdp::testing
