// The average of the weights: as by hand on whole tensors, seen in its scope only, saved and resumed as any state.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

constexpr double kDecay = 0.75;

std::shared_ptr<FunctionModel> make_model() {
  at::manual_seed(5);
  const auto model = std::make_shared<FunctionModel>(
      [](FunctionModel& m, const at::Tensor& x) { return plain_function(m, x.to(m.w.scalar_type())).to(at::kFloat); });
  model->b->bias.requires_grad_(false);  // a frozen one is its own average
  return model;
}

void run_step(FunctionModel& model, Optimizer& optimizer, int step, const Context& context) {
  const Batch batch = part_of(function_batch(step), context.rank(), context.world_size());
  model.loss(batch.input, batch.target).backward();
  optimizer.step();
}

struct Cell {
  ShardOptions options;
  int world_size;
};

class EmaTest : public ::testing::TestWithParam<int> {
 protected:
  static Cell cell() {
    static const std::vector<Cell> cells{{{}, 1},
                                         {{}, 2},
                                         {{}, 3},
                                         {{.strategy = Strategy::kReplicate}, 2},
                                         {{.strategy = Strategy::kShardGradients}, 2},
                                         {{.shard_group = 2}, 4},
                                         {{.precision = {.param = at::kBFloat16}}, 2}};
    Cell chosen = cells[static_cast<std::size_t>(GetParam())];
    chosen.options.units = units_named({"a", "b"});
    return chosen;
  }
  static Tensors masters_of(const Context& context, const Engine& engine) {
    std::vector<ShardView> views = engine.shard_views();
    std::erase_if(views, [](const ShardView& view) { return view.kind != ShardKind::kParameter; });
    return assemble(context, views);
  }
};

TEST_P(EmaTest, IsTheAverageByHandWithinItsScopeAndNothingOutside) {
  run_ranks(cell().world_size, [](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn(make_model);
    Engine engine = shard(context, model, cell().options);
    Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
    engine.keep_ema({.decay = kDecay});
    Tensors expected = masters_of(context, engine);
    for (int step = 0; step < 5; ++step) {
      run_step(*model, optimizer, step, context);
      const Tensors weights = masters_of(context, engine);
      for (auto& [name, average] : expected) average = average * kDecay + weights.at(name) * (1 - kDecay);
      const Tensors before = parameters_of(*model);
      {
        const AveragedWeights scope = engine.use_ema();
        for (const auto& [name, average] : masters_of(context, engine))
          expect_equal(average, expected.at(name), 1e-7, 1e-6, "average of " + name);
        for (const auto& [name, value] : parameters_of(*model))
          expect_equal(value, masters_of(context, engine).at(name).to(value.scalar_type()), 0, 0, name);
        EXPECT_THAT(text_of<InvalidArgument>([&] { optimizer.step(); }), HasSubstr("use_ema"));
      }
      for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, before.at(name), 0, 0, name);
    }
  });
}

TEST_P(EmaTest, ResumesAtAnotherWorldSizeAndStrategy) {
  const TempDir dir;
  const auto averages_of = [](const Context& context, Engine& engine) {
    const AveragedWeights scope = engine.use_ema();
    return masters_of(context, engine);
  };
  Tensors saved;
  run_ranks(cell().world_size, [&](const Context& context) {
    const auto model = in_turn(make_model);
    Engine engine = shard(context, model, cell().options);
    Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
    engine.keep_ema({.decay = kDecay});
    for (int step = 0; step < 3; ++step) run_step(*model, optimizer, step, context);
    engine.save(dir / "run");
    const Tensors averages = averages_of(context, engine);
    if (context.is_main()) saved = averages;
  });
  for (const Cell& other : {Cell{{}, 3}, Cell{{.strategy = Strategy::kShardOptimizer}, 2}}) {
    run_ranks(other.world_size, [&](const Context& context) {
      const auto model = in_turn(make_model);
      ShardOptions options = other.options;
      options.units = units_named({"a", "b"});
      Engine engine = shard(context, model, options);
      engine.optimizer(AdamW{});
      engine.keep_ema({});
      ASSERT_EQ(engine.resume(dir / "run"), 3);
      for (const auto& [name, average] : averages_of(context, engine))
        expect_equal(average, saved.at(name), 0, 0, name);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Cells, EmaTest, ::testing::Range(0, 7));

// As it stands, where a step changes nothing, and for what a step leaves alone.
TEST(EmaRulesTest, MovesTowardsUnusedParametersAndNotInASkippedStep) {
  run_ranks(2, [](const Context& context) {
    const auto model = in_turn(make_model);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    Optimizer optimizer = engine.optimizer(SGD{.lr = 1.0});
    engine.keep_ema({.decay = 0.5});
    {
      const at::NoGradGuard no_grad;
      model->w.add_(8);  // the average knows nothing of it yet
    }
    const at::Tensor weight = model->w.detach().clone();
    const auto average = [&] {
      const AveragedWeights scope = engine.use_ema();
      return model->w.detach().clone();
    };
    model->a(at::ones({1, 16})).sum().backward();
    optimizer.step();
    expect_equal(average(), weight - 4, 1e-5, 1e-5, "w");
    (model->a(at::ones({1, 16})).sum() * std::numeric_limits<double>::infinity()).backward();
    EXPECT_TRUE(optimizer.step({.on_non_finite = OnNonFinite::kSkip}).skipped);
    expect_equal(average(), weight - 4, 1e-5, 1e-5, "w");
    EXPECT_EQ(engine.memory().optimizer_bytes, engine.memory().gradient_shard_bytes);
  });
}

TEST(EmaRulesTest, RefusesByName) {
  run_ranks(1, [](const Context& context) {
    const auto model = make_model();
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    EXPECT_THAT(text_of<InvalidArgument>([&] { const AveragedWeights scope = engine.use_ema(); }),
                HasSubstr("keep_ema first"));
    EXPECT_THAT(text_of<InvalidArgument>([&] { engine.keep_ema({.decay = 1}); }), HasSubstr("decay"));
    engine.keep_ema({});
    EXPECT_THAT(text_of<InvalidArgument>([&] { engine.keep_ema({}); }), HasSubstr("a second"));
    const auto half = make_model();
    half->to(at::kBFloat16);
    Engine other = shard(context, half, {.units = units_named({"a", "b"})});
    EXPECT_THAT(text_of<InvalidArgument>([&] { other.keep_ema({}); }), HasSubstr("precision.param"));
  });
}

}  // namespace
}  // namespace fsdp::testing
