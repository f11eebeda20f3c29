// Clipping, parameter groups, learning rate and gradients that are not finite: the same on every rank and as plain LibTorch does it.
#include <array>
#include <cmath>
#include <limits>
#include <mutex>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

constexpr std::int64_t kLayers = 3, kWidth = 20, kBatch = 12;

std::shared_ptr<StackModel> make_stack() {
  return in_turn([] {
    at::manual_seed(11);
    return std::make_shared<StackModel>(kLayers, kWidth);
  });
}

ShardOptions per_linear() { return {.units = units<torch::nn::Linear>()}; }

void run_backward(StackModel& model, const Batch& batch, double scale = 1) {
  (model.loss(batch.input, batch.target) * scale).backward();
}

// Rank 0's step results and parameters after two clipped SGD steps.
struct Clipped {
  std::vector<double> norms;
  Tensors parameters;
};

Clipped clip_sharded(int world_size, double max_norm) {
  Clipped result;
  std::mutex mutex;
  std::vector<std::vector<double>> norms(static_cast<std::size_t>(world_size));
  run_ranks(world_size, [&](const Context& context) {
    const auto model = make_stack();
    Engine engine = shard(context, model, per_linear());
    Optimizer optimizer = engine.optimizer(SGD{.lr = 0.5});
    for (int step = 0; step < 2; ++step) {
      run_backward(*model,
                   part_of(model->batch(kBatch, 40 + static_cast<std::uint64_t>(step)), context.rank(), world_size));
      norms[static_cast<std::size_t>(context.rank())].push_back(optimizer.step({.max_grad_norm = max_norm}).grad_norm);
    }
    Tensors parameters = parameters_of(*model);
    const std::lock_guard lock(mutex);
    if (context.is_main()) result.parameters = std::move(parameters);
  });
  for (const auto& rank : norms) EXPECT_EQ(rank, norms[0]) << "the norm has other bits on another rank";
  result.norms = norms[0];
  return result;
}

Clipped clip_plain(double max_norm) {
  Clipped result;
  const auto model = make_stack();
  for (int step = 0; step < 2; ++step) {
    run_backward(*model, model->batch(kBatch, 40 + static_cast<std::uint64_t>(step)));
    result.norms.push_back(torch::nn::utils::clip_grad_norm_(model->parameters(), max_norm));
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.sub_(parameter.grad(), 0.5);
    model->zero_grad();
  }
  result.parameters = parameters_of(*model);
  return result;
}

class ClippingTest : public ::testing::TestWithParam<int> {};

TEST_P(ClippingTest, ScalesByTheGlobalNormWhetherItBindsOrNot) {
  for (const double max_norm : {0.01, 1000.0}) {
    const Clipped plain = clip_plain(max_norm), sharded = clip_sharded(GetParam(), max_norm);
    for (std::size_t step = 0; step < plain.norms.size(); ++step)
      EXPECT_NEAR(sharded.norms[step], plain.norms[step], 1e-5 * plain.norms[step]);
    for (const auto& [name, value] : plain.parameters)
      expect_equal(sharded.parameters.at(name), value, 1e-6, 1e-5, name);
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, ClippingTest, ::testing::Values(1, 2, 3, 4));

TEST(ParameterGroupsTest, TheFirstGroupThatMatchesSetsDecayAndRate) {
  run_ranks(2, [](const Context& context) {
    const auto model = make_stack();
    Engine engine = shard(context, model, per_linear());
    const ParameterGroups groups{
        {.matches = [](const std::string& name, std::int64_t) { return name == "layers.1.weight"; }, .lr_scale = 0},
        {.matches = [](const std::string&, std::int64_t ndim) { return ndim < 2; }, .weight_decay = 0}};
    Optimizer optimizer = engine.optimizer(SGD{.lr = 0.5, .weight_decay = 0.25, .groups = groups});
    const Tensors before = parameters_of(*model);
    run_backward(*model, model->batch(4, 1), /*scale=*/0);  // gradients of zero, so that decay alone moves a weight
    optimizer.step();
    for (const auto& [name, value] : parameters_of(*model)) {
      const bool moves = value.dim() == 2 && name != "layers.1.weight";
      expect_equal(value, moves ? before.at(name) - before.at(name) * 0.25 * 0.5 : before.at(name), 1e-7, 1e-6, name);
    }
    optimizer.set_lr(0);
    EXPECT_EQ(optimizer.lr(), 0);
    const Tensors stopped = parameters_of(*model);
    run_backward(*model, model->batch(4, 1));
    optimizer.step();
    for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, stopped.at(name), 0, 0, name);
  });
}

// One element of one rank's gradient is not finite.
TEST(NonFiniteTest, IsDecidedAlikeOnAllRanksAndNamesTheFirstParameter) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    run_ranks(3, [bad](const Context& context) {
      const auto model = make_stack();
      Engine engine = shard(context, model, per_linear());
      Optimizer optimizer = engine.optimizer(AdamW{});
      const Tensors before = parameters_of(*model);
      const auto poison = [&] {
        Batch batch = model->batch(4, 1);
        at::Tensor weight = model->layers[1]->as<torch::nn::Linear>()->bias;
        at::Tensor loss = model->loss(batch.input, batch.target);
        if (context.rank() == 1) loss = loss + (weight * at::full({kWidth}, bad)).sum();
        loss.backward();
      };
      poison();
      try {
        optimizer.step();
        FAIL() << "a step with a gradient that is not finite";
      } catch (const Error& error) {
        EXPECT_EQ(error.id(), ErrorId::kNonFinite);
        EXPECT_THAT(error.what(), ::testing::HasSubstr("layers.1.bias"));
      }
      optimizer.zero_grad();
      poison();
      const StepResult skipped = optimizer.step({.on_non_finite = OnNonFinite::kSkip});
      EXPECT_TRUE(skipped.skipped);
      EXPECT_EQ(skipped.first_bad_parameter, "layers.1.bias");
      EXPECT_EQ(engine.step(), 0);
      for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, before.at(name), 0, 0, name);
      run_backward(*model, model->batch(4, 1));
      EXPECT_FALSE(optimizer.step().skipped);
      EXPECT_EQ(engine.step(), 1);
    });
  }
}

// One unit of which only the first layer is used: its round is open when the settlement comes.
TEST(SettlementTest, AccumulationGoesOnAfterGradientsOfAPartlyUsedUnitWereRead) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](const Context& context) {
      const auto model = make_stack();
      Engine engine = shard(context, model, {.units = units_by_size(1U << 20)});
      ASSERT_EQ(engine.plan().units.size(), 1U);
      Optimizer optimizer = engine.optimizer(SGD{.lr = 0.5});
      const auto backward = [&] {
        model->layers[0]->as<torch::nn::Linear>()->forward(model->batch(kBatch, 3).input).square().mean().backward();
      };
      for (int step = 0; step < 3; ++step) {
        backward();
        const Tensors once = assemble(context, engine.gradient_views());
        EXPECT_EQ(once.size(), 2U);
        backward();
        for (const auto& [name, gradient] : assemble(context, engine.gradient_views())) {
          expect_equal(gradient, once.at(name) * 2, 0, 0, name);
        }
        optimizer.step();
      }
    });
  }
}

TEST(OptimizerOptionsTest, RefusesValuesOutOfRangeByName) {
  run_ranks(1, [](const Context& context) {
    Engine engine = shard(context, make_stack(), per_linear());
    const auto text_of = [](const auto& call) {
      try {
        call();
      } catch (const InvalidArgument& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    EXPECT_THAT(text_of([&] { engine.optimizer(AdamW{.lr = -1}); }), ::testing::HasSubstr("lr"));
    EXPECT_THAT(text_of([&] { engine.optimizer(AdamW{.betas = {0.9, 1}}); }), ::testing::HasSubstr("betas"));
    EXPECT_THAT(text_of([&] { engine.optimizer(SGD{.nesterov = true}); }), ::testing::HasSubstr("nesterov"));
    Optimizer optimizer = engine.optimizer(SGD{});
    EXPECT_THAT(text_of([&] { engine.optimizer(SGD{}); }), ::testing::HasSubstr("a second"));
    EXPECT_THAT(text_of([&] { optimizer.step({.max_grad_norm = 0}); }), ::testing::HasSubstr("max_grad_norm above 0"));
    EXPECT_THAT(text_of([&] { optimizer.set_lr(std::nan("")); }), ::testing::HasSubstr("lr"));
  });
}

}  // namespace
}  // namespace fsdp::testing
