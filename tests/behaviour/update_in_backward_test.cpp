// ShardOptions::update_in_backward: the bits of a step without clipping, less memory, and no way back.
#include <chrono>
#include <future>
#include <limits>
#include <mutex>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSteps = 4;

struct Cell {
  const char* name;
  int world_size;
  ShardOptions options{};
  const char* backend = "thread";
};
void PrintTo(const Cell& cell, std::ostream* out) { *out << cell.name; }

// Unit a is used by even steps only, its bias by every other one of these on rank 0, and w on even ranks only: whole rounds,
// parts, parameters that no rank uses, and none.
std::shared_ptr<FunctionModel> make_model(const std::shared_ptr<int>& step, int rank) {
  at::manual_seed(5);
  return std::make_shared<FunctionModel>([step, rank](FunctionModel& model, const at::Tensor& input) {
    at::Tensor x = input.to(model.w.scalar_type());
    if (*step % 2 == 0) {
      x = at::linear(x, model.a->weight, rank == 0 && *step % 4 == 0 ? model.a->bias : at::Tensor())
              .narrow(1, 5, FunctionModel::kWidth);
    }
    x = at::tanh(model.b(at::tanh(x)));
    return (rank % 2 == 0 ? x.matmul(model.w) : x).to(at::kFloat);
  });
}

template <class Options>
Tensors train(const Cell& cell, const Options& optimizer_options, bool in_backward) {
  Tensors outcome;
  RunRanksOptions ranks;
  ranks.backend = cell.backend;
  run_ranks(
      cell.world_size,
      [&](const Context& context) {
        at::set_num_threads(1);
        const auto step = std::make_shared<int>(0);
        const auto model = in_turn([&] { return make_model(step, context.rank()); });
        ShardOptions options = cell.options;
        options.units = units_named({"a", "b"});
        options.update_in_backward = in_backward;
        Engine engine = shard(context, model, options);
        Optimizer optimizer = engine.optimizer(optimizer_options);
        engine.keep_ema({.decay = 0.7});
        optimizer.set_schedule(step_decay(2, 0.5));
        double norm = 0;
        for (; *step < kSteps; ++*step) {
          const Batch batch = part_of(function_batch(*step), context.rank(), cell.world_size);
          model->loss(batch.input, batch.target).backward();
          norm += optimizer.step().grad_norm;
        }
        EXPECT_EQ(engine.step(), kSteps);
        const Tensors views = assemble(context, engine.shard_views());  // parameters, states and averages
        if (context.is_main()) {
          outcome = views;
          outcome["norm"] = at::tensor(norm, at::kDouble);
        }
      },
      ranks);
  return outcome;
}

class UpdateInBackwardTest : public ::testing::TestWithParam<Cell> {
 protected:
  template <class Options>
  static void expect_the_bits_of_a_step(const Options& options) {
    const Tensors expected = train(GetParam(), options, false), found = train(GetParam(), options, true);
    EXPECT_EQ(found.size(), expected.size());
    for (const auto& [name, value] : expected) expect_equal(found.at(name), value, 0, 0, name);
  }
};

TEST_P(UpdateInBackwardTest, HasTheBitsOfAdamWAtTheStep) { expect_the_bits_of_a_step(AdamW{.lr = 1e-2}); }
TEST_P(UpdateInBackwardTest, HasTheBitsOfAdamAtTheStep) { expect_the_bits_of_a_step(Adam{.lr = 1e-2}); }
TEST_P(UpdateInBackwardTest, HasTheBitsOfMomentumAtTheStep) {
  expect_the_bits_of_a_step(SGD{.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.1});
}

std::vector<Cell> cells() {
  std::vector<Cell> all{
      {"One", 1}, {"Two", 2}, {"Three", 3}, {"Four", 4}, {"TwoOnShm", 2, {}, "shm"}, {"TwoOnTcp", 2, {}, "tcp"}};
  all.push_back({"NoPrefetch", 3, {.prefetch = 0}});
  all.push_back({"Kept", 3, {.strategy = Strategy::kShardGradients}});
  all.push_back({"HybridOfTwoOnFour", 4, {.shard_group = 2}});
  all.push_back({"CopiesOnly", 2, {.shard_group = 1}});
  all.push_back({"Bf16", 2, {.precision = {.param = at::kBFloat16}}});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cells, UpdateInBackwardTest, ::testing::ValuesIn(cells()),
                         [](const auto& test) { return std::string(test.param.name); });

void on_ranks(int world_size, const std::function<void(const Context&, FunctionModel&, Engine&, Optimizer&)>& body) {
  run_ranks(world_size, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn(make_plain_model);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"}), .update_in_backward = true});
    Optimizer optimizer = engine.optimizer(SGD{.lr = 1});
    body(context, *model, engine, optimizer);
  });
}

at::Tensor loss_of(FunctionModel& model, int step = 0) {
  const Batch batch = function_batch(step);
  return model.loss(batch.input, batch.target);
}

TEST(UpdateInBackwardMemoryTest, IsThatOfTheLargestUnitsShare) {
  constexpr std::size_t kLargest = 4 * 3 * FunctionModel::kWidth * (FunctionModel::kWidth + 1);  // a, fp32
  for (const int world_size : {1, 2, 4}) {
    on_ranks(world_size, [&](const Context&, FunctionModel&, Engine& engine, Optimizer&) {
      const std::size_t found = engine.memory().gradient_shard_bytes;
      const std::size_t share = kLargest / static_cast<std::size_t>(world_size);
      EXPECT_GE(found, share);
      EXPECT_LE(found, share + 512);  // alignment of parameters and shares
    });
  }
}

// The update asks for the rate, so that it tells when it begins: before anyone calls the step.
TEST(UpdateInBackwardOverlapTest, UpdatesBeforeTheStepIsCalled) {
  on_ranks(2, [](const Context&, FunctionModel& model, Engine&, Optimizer& optimizer) {
    std::promise<void> began;
    optimizer.set_schedule([&, once = std::make_shared<std::once_flag>()](std::int64_t) {
      std::call_once(*once, [&] { began.set_value(); });
      return 1.0;
    });
    loss_of(model).backward();
    EXPECT_EQ(began.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
    optimizer.step();
  });
}

TEST(UpdateInBackwardRefusalTest, WhatWouldReadOrUndoAHalfUpdatedModel) {
  const TempDir dir;
  on_ranks(2, [&](const Context&, FunctionModel& model, Engine& engine, Optimizer& optimizer) {
    const at::Tensor loss = loss_of(model);
    loss.backward({}, /*retain_graph=*/true);
    const auto expect_refused = [](const std::function<void()>& body, const char* what) {
      EXPECT_THAT(text_of<InvalidArgument>(body), AllOf(HasSubstr(what), HasSubstr("update_in_backward")));
    };
    expect_refused([&] { loss_of(model); }, "call Optimizer::step before the next forward");
    expect_refused([&] { loss.backward(); }, "call Optimizer::step");
    expect_refused([&] { engine.save(dir.path()); }, "Engine::save");
    expect_refused([&] { engine.consolidate(dir.path() / "x.safetensors"); }, "Engine::consolidate");
    expect_refused([&] { const Summoned scope = engine.summon(); }, "Engine::summon");
    expect_refused([&] { optimizer.zero_grad(); }, "Optimizer::zero_grad");
    expect_refused([&] { optimizer.set_lr(2); }, "Optimizer::set_lr");
    expect_refused([&] { optimizer.set_schedule(step_decay(2, 0.5)); }, "Optimizer::set_schedule");
    optimizer.step();
    engine.save(dir.path());
    loss_of(model).backward();
    optimizer.step();
    EXPECT_EQ(engine.step(), 2);
  });
}

// Module::zero_grad asks nobody, so the step is where it is found.
TEST(UpdateInBackwardRefusalTest, AClearOfWhatIsUpdatedAlready) {
  const TempDir dir;
  on_ranks(2, [&](const Context&, FunctionModel& model, Engine& engine, Optimizer& optimizer) {
    engine.save(dir.path());
    for (const bool to_none : {false, true}) {
      loss_of(model).backward();
      model.zero_grad(to_none);
      EXPECT_THAT(text_of<InvalidArgument>([&] { optimizer.step(); }),
                  AllOf(HasSubstr("Module::zero_grad"), HasSubstr("resume from the newest checkpoint")));
      ASSERT_EQ(engine.resume(dir.path()), 0);
    }
    loss_of(model).backward();
    optimizer.step();
    EXPECT_EQ(engine.step(), 1);
  });
}

TEST(UpdateInBackwardRefusalTest, WhatNeedsGradientsOfTheWholeStep) {
  on_ranks(1, [](const Context&, FunctionModel& model, Engine& engine, Optimizer& optimizer) {
    LossScaler scaler;
    const auto expect_refused = [](const std::function<void()>& body, const char* what) {
      EXPECT_THAT(text_of<InvalidArgument>(body), AllOf(HasSubstr(what), HasSubstr("update_in_backward")));
    };
    expect_refused([&] { optimizer.step({.max_grad_norm = 1}); }, "max_grad_norm");
    expect_refused([&] { optimizer.step({.max_grad_value = 1}); }, "max_grad_value");
    expect_refused([&] { optimizer.step({.norm_type = 1}); }, "norm_type");
    expect_refused([&] { optimizer.step({.on_non_finite = OnNonFinite::kSkip}); }, "on_non_finite");
    expect_refused([&] { optimizer.step({.on_non_finite = OnNonFinite::kStop}); }, "on_non_finite");
    expect_refused([&] { optimizer.step({.scaler = &scaler}); }, "scaler");
    expect_refused([&] { engine.weigh(loss_of(model), 3); }, "Engine::weigh");
    expect_refused([&] { engine.gradient_views(); }, "Engine::gradient_views");
    expect_refused([&] { const Summoned scope = engine.summon({.gradients = true}); }, "Engine::summon");
    expect_refused([&] { const NoSync scope = engine.no_sync(); }, "Engine::no_sync");
  });
}

TEST(UpdateInBackwardRefusalTest, OptimizersAndStrategiesOfTheWholeStep) {
  run_ranks(2, [](const Context& context) {
    const auto make = [] { return in_turn(make_plain_model); };
    for (const Strategy strategy : {Strategy::kReplicate, Strategy::kShardOptimizer}) {
      EXPECT_THAT(
          text_of<InvalidArgument>([&] { shard(context, make(), {.strategy = strategy, .update_in_backward = true}); }),
          AllOf(HasSubstr("update_in_backward"), HasSubstr("strategy"), HasSubstr("choose kShardGradients")));
    }
    EXPECT_THAT(
        text_of<InvalidArgument>([&] { shard(context, make(), {.ordered_sums = true, .update_in_backward = true}); }),
        AllOf(HasSubstr("ordered_sums"), HasSubstr("update_in_backward")));
    const auto model = make();
    Engine engine = shard(context, model, {.update_in_backward = true});
    EXPECT_THAT(text_of<InvalidArgument>([&] { engine.optimizer(Muon{}); }),
                AllOf(HasSubstr("Muon"), HasSubstr("update_in_backward")));
    EXPECT_THAT(text_of<InvalidArgument>([&] { loss_of(*model).backward(); }), HasSubstr("Engine::optimizer first"));
  });
}

TEST(UpdateInBackwardFailureTest, SaysThatTheWeightsAreLost) {
  const TempDir dir;
  on_ranks(2, [&](const Context& context, FunctionModel& model, Engine& engine, Optimizer& optimizer) {
    engine.save(dir.path());
    const Tensors before = parameters_of(model);
    loss_of(model).mul(context.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1).backward();
    EXPECT_THAT(text_of<Error>([&] { optimizer.step(); }),
                AllOf(HasSubstr("not finite"), HasSubstr("resume from the newest checkpoint")));
    EXPECT_EQ(engine.resume(dir.path()), 0);
    for (const auto& [name, value] : parameters_of(model)) expect_equal(value, before.at(name), 0, 0, name);
    EXPECT_THAT(text_of<StepFailed>([&] {
                  engine.attempt([&] {
                    loss_of(model).backward();
                    if (context.rank() == 1) throw std::runtime_error("a bad sample");
                    optimizer.step();
                  });
                }),
                AllOf(HasSubstr("a bad sample"), HasSubstr("resume from the newest checkpoint")));
    engine.resume(dir.path());
    loss_of(model).backward();
    optimizer.step();
    EXPECT_EQ(engine.step(), 1);
  });
}

}  // namespace
}  // namespace fsdp::testing
