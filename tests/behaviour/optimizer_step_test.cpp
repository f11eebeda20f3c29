// Optimizers, parameter groups, learning rate and gradients that are not finite: the same on every rank and as plain
// LibTorch does it.
#include <array>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>

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

// Adam's decay is in the gradient, AdamW's beside it.
TEST(AdamTest, EqualsTorchOptimAdamToRounding) {
  Tensors expected;
  {
    const auto model = make_stack();
    torch::optim::Adam plain(model->parameters(),
                             torch::optim::AdamOptions(1e-2).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.3));
    for (std::uint64_t step = 0; step < 4; ++step) {
      run_backward(*model, model->batch(kBatch, 40 + step));
      plain.step();
      model->zero_grad();
    }
    expected = parameters_of(*model);
  }
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Context& context) {
      const auto model = make_stack();
      Engine engine = shard(context, model, per_linear());
      Optimizer optimizer = engine.optimizer(Adam{.lr = 1e-2, .betas = {0.8, 0.95}, .eps = 1e-6, .weight_decay = 0.3});
      for (std::uint64_t step = 0; step < 4; ++step) {
        run_backward(*model, part_of(model->batch(kBatch, 40 + step), context.rank(), world_size));
        optimizer.step();
      }
      for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, expected.at(name), 1e-5, 1e-4, name);
    });
  }
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
      poison();
      const StepResult stopped = optimizer.step({.on_non_finite = OnNonFinite::kStop});
      EXPECT_TRUE(stopped.skipped && stopped.stop);
      run_backward(*model, model->batch(4, 1));
      const StepResult good = optimizer.step({.on_non_finite = OnNonFinite::kStop});
      EXPECT_FALSE(good.skipped || good.stop);
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
    EXPECT_THAT(text_of([&] { optimizer.step({.norm_type = 0}); }), ::testing::HasSubstr("norm_type above 0"));
    EXPECT_THAT(text_of([&] { optimizer.step({.max_grad_value = -1}); }), ::testing::HasSubstr("max_grad_value"));
    EXPECT_THAT(text_of([&] { optimizer.step({.max_grad_norm = 1, .max_grad_value = 2}); }),
                ::testing::HasSubstr("max_grad_norm 1 together with max_grad_value 2"));
    EXPECT_THAT(text_of([&] { optimizer.set_lr(std::nan("")); }), ::testing::HasSubstr("lr"));
  });
}

}  // namespace
}  // namespace fsdp::testing
