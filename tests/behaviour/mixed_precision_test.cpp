// 16-bit compute with fp32 masters: one rank has the bits of the recipe done by hand, several its numbers.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "sharding/optimizer_kernels.h"
#include "tests/behaviour/function_model.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The input meets the weights in their type, the loss is fp32.
at::Tensor cast_function(FunctionModel& model, const at::Tensor& x) {
  return plain_function(model, x.to(model.w.scalar_type())).to(at::kFloat);
}

std::shared_ptr<FunctionModel> make_model() {
  at::manual_seed(5);
  return std::make_shared<FunctionModel>(cast_function);
}

// By hand, with plain LibTorch: masters in fp32, a 16-bit copy in the module, and our kernel between them.
struct Recipe {
  std::vector<double> losses;
  Tensors masters, computed;
};
Recipe train_by_hand(at::ScalarType type, int steps) {
  at::set_num_threads(1);
  const auto model = make_model();
  struct State {
    at::Tensor master, first, second;
  };
  std::map<std::string, State> states;
  for (const auto& item : model->named_parameters()) {
    const at::Tensor master = item.value().detach().clone();
    states[item.key()] = {master, at::zeros_like(master), at::zeros_like(master)};
  }
  model->to(type);
  Recipe recipe;
  const at::NoGradGuard no_grad;
  for (int step = 0; step < steps; ++step) {
    const Batch batch = function_batch(step);
    {
      const at::AutoGradMode with_grad(true);
      const at::Tensor loss = model->loss(batch.input, batch.target);
      loss.backward();
      recipe.losses.push_back(loss.item<double>());
    }
    for (const auto& item : model->named_parameters()) {
      State& state = states.at(item.key());
      const at::Tensor gradient = item.value().grad().to(at::kFloat);
      const auto bytes = [](const at::Tensor& t) { return static_cast<std::byte*>(t.mutable_data_ptr()); };
      adam_update({DType::kFloat32, bytes(state.master), bytes(gradient), bytes(state.first), bytes(state.second),
                   state.master.numel()},
                  {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 1e-2, .step = step + 1});
      item.value().copy_(state.master);
    }
    model->zero_grad();
  }
  for (const auto& [name, state] : states) recipe.masters[name] = state.master;
  recipe.computed = parameters_of(*model);
  return recipe;
}

Tensors masters_of(const Context& context, const Engine& engine) {
  std::vector<ShardView> views = engine.shard_views();
  std::erase_if(views, [](const ShardView& view) { return view.kind != ShardKind::kParameter; });
  return assemble(context, views);
}

Recipe train_with_engine(at::ScalarType type, int steps, int world_size, ShardOptions options = {}) {
  Recipe recipe;
  options.units = units_named({"a", "b"});
  options.precision.param = type;
  run_ranks(world_size, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn(make_model);
    Engine engine = shard(context, model, options);
    Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
    Recipe own;
    for (int step = 0; step < steps; ++step) {
      const Batch batch = part_of(function_batch(step), context.rank(), world_size);
      const at::Tensor loss = model->loss(batch.input, batch.target);
      loss.backward();
      own.losses.push_back(context.mean(loss.item<double>()));
      optimizer.step();
    }
    own.masters = masters_of(context, engine);
    own.computed = parameters_of(*model);
    if (context.is_main()) recipe = std::move(own);
  });
  return recipe;
}

class MixedPrecisionTest : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(MixedPrecisionTest, HasTheBitsOfTheRecipeByHand) {
  const Recipe plain = train_by_hand(GetParam(), 6);
  for (const Strategy strategy : {Strategy::kFullShard, Strategy::kShardGradients, Strategy::kReplicate}) {
    const Recipe sharded = train_with_engine(GetParam(), 6, 1, {.strategy = strategy});
    EXPECT_EQ(sharded.losses, plain.losses);
    for (const auto& [name, master] : plain.masters) {
      expect_equal(sharded.masters.at(name), master, 0, 0, "master of " + name);
      expect_equal(sharded.computed.at(name), plain.computed.at(name), 0, 0, name);
    }
  }
}

TEST_P(MixedPrecisionTest, FollowsTheRecipeOnSeveralRanksAlikeForEveryStrategy) {
  const Recipe plain = train_by_hand(GetParam(), 6);
  for (const int world_size : {2, 3, 4}) {
    const Recipe full = train_with_engine(GetParam(), 6, world_size);
    for (std::size_t step = 0; step < plain.losses.size(); ++step)
      EXPECT_NEAR(full.losses[step], plain.losses[step], 2e-2 * plain.losses[step]);
    // Adam takes steps of lr whatever the size of a gradient, so a sign that rounding flips costs 2 lr.
    for (const auto& [name, master] : plain.masters)
      EXPECT_LT((full.masters.at(name) - master).abs().mean().item<double>(), 5e-3) << name;
    for (const ShardOptions& options :
         {ShardOptions{.strategy = Strategy::kShardGradients}, ShardOptions{.strategy = Strategy::kShardOptimizer},
          ShardOptions{.strategy = Strategy::kReplicate}, ShardOptions{.shard_group = 1},
          ShardOptions{.prefetch = 0}}) {
      const Recipe other = train_with_engine(GetParam(), 6, world_size, options);
      EXPECT_EQ(other.losses, full.losses);
      for (const auto& [name, master] : full.masters) expect_equal(other.masters.at(name), master, 0, 0, name);
    }
  }
}

// What is computed is the master, rounded, at every moment: after shard, a step, a resume, a file, an operator.
TEST_P(MixedPrecisionTest, KeepsParametersTheRoundedMasters) {
  const TempDir dir;
  for (const Strategy strategy : {Strategy::kFullShard, Strategy::kShardOptimizer}) {
    run_ranks(2, [&](const Context& context) {
      at::set_num_threads(1);
      const auto model = in_turn(make_model);
      const Tensors original = parameters_of(*model);
      Engine engine = shard(
          context, model, {.units = units_named({"a", "b"}), .strategy = strategy, .precision = {.param = GetParam()}});
      Optimizer optimizer = engine.optimizer(AdamW{});
      const auto expect_rounded = [&](const std::string& when) {
        const Tensors masters = masters_of(context, engine);
        for (const auto& [name, value] : parameters_of(*model)) {
          EXPECT_EQ(masters.at(name).scalar_type(), at::kFloat);
          expect_equal(value, masters.at(name).to(GetParam()), 0, 0, name + " " + when);
        }
        return masters;
      };
      Tensors masters = expect_rounded("after shard");
      for (const auto& [name, value] : original) expect_equal(masters.at(name), value, 0, 0, name);
      const Batch batch = function_batch(0);
      model->loss(batch.input, batch.target).backward();
      optimizer.step();
      const Tensors stepped = expect_rounded("after a step");
      const std::string name = "run" + std::to_string(static_cast<int>(strategy));
      engine.save(dir / name);
      engine.consolidate(dir / (name + ".safetensors"));
      {
        const at::NoGradGuard no_grad;
        model->w.mul_(2);
      }
      masters = expect_rounded("after an operator");
      expect_equal(masters.at("w"), stepped.at("w").to(GetParam()).mul(2).to(at::kFloat), 0, 0, "w");
      expect_equal(masters.at("a.weight"), stepped.at("a.weight"), 0, 0, "a.weight");
      ASSERT_EQ(engine.resume(dir / name), 1);
      masters = expect_rounded("after resume");
      for (const auto& [key, value] : stepped) expect_equal(masters.at(key), value, 0, 0, key);
      model->loss(batch.input, batch.target).backward();
      optimizer.step();
      engine.load_consolidated(dir / (name + ".safetensors"));
      masters = expect_rounded("after load_consolidated");
      for (const auto& [key, value] : stepped) expect_equal(masters.at(key), value, 0, 0, key);
    });
  }
}

TEST_P(MixedPrecisionTest, GathersHalfTheBytes) {
  const auto gathered = [](at::ScalarType type) {
    std::size_t bytes = 0;
    std::mutex mutex;
    run_ranks(2,
              [&](const Context& context) {
                // 64 * 64 + 64 elements halve into multiples of 64 bytes in either type.
                const auto model = in_turn([] { return std::make_shared<StackModel>(3, 64); });
                Engine engine = shard(context, model,
                                      {.units = units<torch::nn::Linear>(), .precision = {.param = type}});
                const at::NoGradGuard no_grad;
                model->forward(at::ones({2, 64}, type));
              },
              {.on_record = [&](int rank, const CommunicatorRecord& record) {
                const std::lock_guard lock(mutex);
                if (rank == 0 && record.operation == "gather") bytes += record.bytes;
              }});
    return bytes;
  };
  EXPECT_EQ(gathered(GetParam()) * 2, gathered(at::kFloat));
}

TEST_P(MixedPrecisionTest, LeavesBuffersAndOtherTypesAlone) {
  struct Model final : torch::nn::Module {
    Model() : torch::nn::Module("Model") {
      weight = register_parameter("weight", at::ones({8}));
      wide = register_parameter("wide", at::ones({8}, at::kDouble));
      counts = register_parameter("counts", at::ones({8}, at::kLong), /*requires_grad=*/false);
      mean = register_buffer("mean", at::ones({8}));
    }
    at::Tensor weight, wide, counts, mean;
  };
  run_ranks(2, [](const Context& context) {
    const auto model = std::make_shared<Model>();
    const Engine engine = shard(context, std::static_pointer_cast<torch::nn::Module>(model),
                                {.precision = {.param = GetParam()}});
    EXPECT_EQ(model->weight.scalar_type(), GetParam());
    EXPECT_EQ(model->wide.scalar_type(), at::kDouble);
    EXPECT_EQ(model->counts.scalar_type(), at::kLong);
    EXPECT_EQ(model->mean.scalar_type(), at::kFloat);
  });
}

INSTANTIATE_TEST_SUITE_P(Types, MixedPrecisionTest, ::testing::Values(at::kBFloat16, at::kHalf),
                         [](const auto& tested) { return std::string(c10::toString(tested.param)); });

// Gradients that travel in 16 bits are rounded once, on the rank that made them, and summed in fp32.
TEST(ReduceTypeTest, RoundsEachRanksGradientOnce) {
  run_ranks(3, [](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn([] {
      at::manual_seed(5);
      return std::make_shared<FunctionModel>(plain_function);
    });
    Engine engine = shard(context, model, {.units = units_named({"a", "b"}), .precision = {.reduce = at::kBFloat16}});
    const at::Tensor own = at::arange(256, at::kFloat).reshape({16, 16}) *
                           (0.0137F * static_cast<float>(context.rank() + 1));
    (model->w * own).sum().backward();
    const Tensors gradients = assemble(context, engine.gradient_views());
    at::Tensor sum = at::zeros({16, 16});
    for (int rank = 0; rank < 3; ++rank) {
      sum += (at::arange(256, at::kFloat).reshape({16, 16}) * (0.0137F * static_cast<float>(rank + 1)))
                 .to(at::kBFloat16)
                 .to(at::kFloat);
    }
    expect_equal(gradients.at("w"), sum / 3, 0, 0, "w");
  });
}

TEST(AutocastTest, RunsOnTopAndEqualsPlainAutocast) {
  Training training = function_training();
  training.run_step = [](LossModel& model, const Batch& batch) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
    const at::Tensor loss = model.loss(batch.input, batch.target);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    loss.backward();
    return loss.item<double>();
  };
  expect_bit_equal(train_sharded(training, 1), train_plain(training));
}

// Engine::forward casts as a user would by hand, gradients and all; what is no floating-point tensor passes through.
TEST(EngineForwardTest, CastsInputsAndResultsAsByHand) {
  for (const at::ScalarType output : {at::kFloat, at::kDouble, at::kHalf}) {
    run_ranks(2, [&](const Context& context) {
      at::set_num_threads(1);
      const auto by_hand = in_turn(make_model), called = in_turn(make_model);
      const auto options = [&](std::optional<at::ScalarType> type) {
        return ShardOptions{.units = units_named({"a", "b"}), .precision = {.param = at::kBFloat16, .output = type}};
      };
      Engine first = shard(context, by_hand, options(std::nullopt)), second = shard(context, called, options(output));
      Optimizer plain = first.optimizer(SGD{.lr = 1}), optimizer = second.optimizer(SGD{.lr = 1});
      const at::Tensor rows = at::arange(12);
      for (int step = 0; step < 3; ++step) {
        const Batch batch = function_batch(step);
        const at::Tensor expected = plain_function(*by_hand, batch.input.to(at::kBFloat16)).to(output);
        const auto [found, same_rows, number] = second.forward(
            [&](const at::Tensor& x, const at::Tensor& integers, int factor) {
              EXPECT_EQ(x.scalar_type(), at::kBFloat16);
              EXPECT_TRUE(integers.is_same(rows));
              return std::tuple{plain_function(*called, x), integers, at::scalar_tensor(factor, at::kLong)};
            },
            batch.input, rows, 7);
        EXPECT_EQ(found.scalar_type(), output);
        EXPECT_TRUE(same_rows.is_same(rows));
        EXPECT_EQ(number.item<int>(), 7);
        EXPECT_TRUE(at::equal(found, expected));
        expected.to(at::kFloat).square().mean().backward();
        found.to(at::kFloat).square().mean().backward();
        plain.step();
        optimizer.step();
      }
      const Tensors expected = parameters_of(*by_hand);
      for (const auto& [name, value] : parameters_of(*called)) expect_equal(value, expected.at(name), 0, 0, name);
    });
  }
}

TEST(EngineForwardTest, PassesAllThroughWhereNoPrecisionIsSet) {
  run_ranks(1, [](const Context& context) {
    const auto model = in_turn(make_model);
    Engine engine = shard(context, model);
    const at::Tensor x = at::ones({2}, at::kDouble);
    const std::vector<at::Tensor> same = engine.forward(
        [](const at::Tensor& a, const at::Tensor& b) {
          return std::vector{a, b};
        },
        x, at::Tensor());
    EXPECT_TRUE(same[0].is_same(x));
    EXPECT_FALSE(same[1].defined());
  });
}

TEST(EngineForwardTest, IsWhereAnOutputTypeIsMetOrElseTheStepIsRefused) {
  run_ranks(2, [](const Context& context) {
    const auto model = in_turn(make_model);
    Engine engine = shard(context, model, {.precision = {.param = at::kBFloat16, .output = at::kFloat}});
    Optimizer optimizer = engine.optimizer(SGD{});
    optimizer.step();  // of a rank without data
    const Batch batch = function_batch(0);
    for (const bool goes_through : {true, false, true}) {
      const auto forward = [&](const at::Tensor& x) { return plain_function(*model, x.to(at::kBFloat16)); };
      (goes_through ? engine.forward(forward, batch.input) : forward(batch.input)).sum().backward();
      if (goes_through) {
        optimizer.step();
        continue;
      }
      EXPECT_THAT(text_of<InvalidArgument>([&] { optimizer.step(); }),
                  AllOf(HasSubstr("precision.output is Float"), HasSubstr("Engine::forward")));
      optimizer.zero_grad();
    }
    EXPECT_EQ(engine.step(), 3);
    const auto other = in_turn(make_model);
    EXPECT_THAT(text_of<InvalidArgument>([&] { shard(context, other, {.precision = {.output = at::kInt}}); }),
                AllOf(HasSubstr("precision.output"), HasSubstr("Int")));
    EXPECT_THAT(text_of<InvalidArgument>([&] {
                  shard(context, other, {.per_unit = [](const std::string&) {
                          return UnitOptions{.precision = {.output = at::kFloat}};
                        }});
                }),
                HasSubstr("precision.output of one unit"));
  });
}

}  // namespace
}  // namespace fsdp::testing
