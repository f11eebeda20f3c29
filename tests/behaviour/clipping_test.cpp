// Clipping by any norm over parameters that are tied, frozen, replicated, sharded, of several types; by value; and with
// a loss scale: the same on every rank, and as plain LibTorch does it.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include <limits>
#include <mutex>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A weight tied under two names, a frozen one, one in fp64, and the units of FunctionModel.
struct Model final : LossModel {
  Model() : LossModel("Model") {
    a = register_module("a", torch::nn::Linear(16, 16));
    b = register_module("b", torch::nn::Linear(16, 16));
    wide = register_parameter("wide", at::randn({16}, at::kDouble));
    b->register_parameter("tied", a->weight);
    frozen = a->register_parameter("frozen", at::randn({16}), /*requires_grad=*/false);
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    const at::Tensor hidden = at::tanh(a(input) * frozen).matmul(a->weight);
    return at::mse_loss(at::tanh(b(hidden)) * wide.to(at::kFloat), target);
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  at::Tensor wide, frozen;
};

std::shared_ptr<Model> make_model() {
  return in_turn([] {
    at::manual_seed(11);
    return std::make_shared<Model>();
  });
}

struct Outcome {
  std::vector<double> norms;
  Tensors parameters;
};

template <class Clip>
Outcome train_plain(const Clip& clip) {
  at::set_num_threads(1);
  Outcome outcome;
  const auto model = make_model();
  std::vector<at::Tensor> trained{model->a->weight, model->a->bias, model->b->weight, model->b->bias, model->wide};
  for (int step = 0; step < 3; ++step) {
    const Batch batch = function_batch(step);
    model->loss(batch.input, batch.target).backward();
    outcome.norms.push_back(clip(trained));
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : trained) {
      parameter.sub_(parameter.grad(), 0.5);
      parameter.mutable_grad().reset();
    }
  }
  outcome.parameters = parameters_of(*model);
  return outcome;
}

Outcome train_sharded(int world_size, ShardOptions options, const StepOptions& clip, LossScaler* scaler = nullptr) {
  options.units = units<torch::nn::Linear>();
  Outcome outcome;
  std::mutex mutex;
  std::vector<std::vector<double>> norms(static_cast<std::size_t>(world_size));
  run_ranks(world_size, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = make_model();
    Engine engine = shard(context, model, options);
    Optimizer optimizer = engine.optimizer(SGD{.lr = 0.5});
    StepOptions step_options = clip;
    LossScaler own = scaler != nullptr ? *scaler : LossScaler();
    if (scaler != nullptr) step_options.scaler = &own;
    for (int step = 0; step < 3; ++step) {
      const Batch batch = part_of(function_batch(step), context.rank(), world_size);
      const at::Tensor loss = model->loss(batch.input, batch.target);
      (scaler != nullptr ? own.scale(loss) : loss).backward();
      norms[static_cast<std::size_t>(context.rank())].push_back(optimizer.step(step_options).grad_norm);
    }
    Tensors parameters = parameters_of(*model);
    const std::lock_guard lock(mutex);
    if (context.is_main()) outcome.parameters = std::move(parameters);
  });
  for (const auto& rank : norms) EXPECT_EQ(rank, norms[0]) << "the norm has other bits on another rank";
  outcome.norms = norms[0];
  return outcome;
}

void expect_near(const Outcome& actual, const Outcome& expected) {
  for (std::size_t step = 0; step < expected.norms.size(); ++step)
    EXPECT_NEAR(actual.norms[step], expected.norms[step], 2e-5 * expected.norms[step]);
  for (const auto& [name, value] : expected.parameters)
    expect_equal(actual.parameters.at(name), value, 2e-6, 2e-5, name);
}

const std::vector<ShardOptions>& strategies() {
  static const std::vector<ShardOptions> options{
      {},
      {.strategy = Strategy::kReplicate},
      {.strategy = Strategy::kShardOptimizer},
      {.shard_group = 1},
      {.per_unit = [](const std::string& unit) {
        return UnitOptions{.strategy = unit == "a" ? Strategy::kReplicate : Strategy::kFullShard};
      }}};
  return options;
}

class ClippingTest : public ::testing::TestWithParam<int> {};

TEST_P(ClippingTest, ScalesByTheGlobalNormWhetherItBindsOrNot) {
  for (const double p : {2.0, 1.0, 3.0, kInfinity}) {
    for (const double max_norm : {0.01, 1000.0}) {
      const Outcome plain = train_plain(
          [&](std::vector<at::Tensor>& trained) { return torch::nn::utils::clip_grad_norm_(trained, max_norm, p); });
      for (const ShardOptions& options : strategies())
        expect_near(train_sharded(GetParam(), options, {.max_grad_norm = max_norm, .norm_type = p}), plain);
    }
  }
}

TEST_P(ClippingTest, ClampsByValue) {
  const Outcome plain = train_plain([](std::vector<at::Tensor>& trained) {
    const double norm = torch::nn::utils::clip_grad_norm_(trained, 1e9);
    torch::nn::utils::clip_grad_value_(trained, 1e-3);
    return norm;
  });
  for (const ShardOptions& options : strategies())
    expect_near(train_sharded(GetParam(), options, {.max_grad_value = 1e-3}), plain);
}

// A power of two scales without rounding, so that nothing but the range of the gradients changes.
TEST_P(ClippingTest, SeesGradientsWithoutTheLossScale) {
  for (const StepOptions& clip : {StepOptions{.max_grad_norm = 0.01}, StepOptions{.max_grad_value = 1e-3}}) {
    LossScaler scaler({.initial_scale = 1024});
    const Outcome scaled = train_sharded(GetParam(), {}, clip, &scaler), plain = train_sharded(GetParam(), {}, clip);
    EXPECT_EQ(scaled.norms, plain.norms);
    for (const auto& [name, value] : plain.parameters)
      expect_equal(scaled.parameters.at(name), value, 1e-7, 1e-6, name);
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, ClippingTest, ::testing::Values(1, 2, 3, 4));

TEST(LossScalerTest, BacksOffTogetherAndGrowsAfterItsInterval) {
  run_ranks(3, [](const Context& context) {
    at::set_num_threads(1);
    const auto model = make_model();
    Engine engine = shard(context, model, {.units = units<torch::nn::Linear>()});
    Optimizer optimizer = engine.optimizer(AdamW{});
    LossScaler scaler({.initial_scale = 8, .growth_interval = 2});
    const auto step = [&](double factor) {
      const Batch batch = function_batch(0);
      // One rank alone overflows.
      scaler.scale(model->loss(batch.input, batch.target) * (context.rank() == 1 ? factor : 1.0)).backward();
      return optimizer.step({.scaler = &scaler});
    };
    const Tensors before = parameters_of(*model);
    EXPECT_TRUE(step(kInfinity).skipped);
    EXPECT_EQ(scaler.scale(), 4);
    for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, before.at(name), 0, 0, name);
    EXPECT_FALSE(step(1).skipped);
    EXPECT_EQ(scaler.finite_steps(), 1);
    EXPECT_TRUE(step(kInfinity).skipped);
    EXPECT_EQ(scaler.scale(), 2);
    EXPECT_FALSE(step(1).skipped);
    EXPECT_FALSE(step(1).skipped);
    EXPECT_EQ(scaler.scale(), 4);
    EXPECT_EQ(engine.step(), 3);
    LossScaler resumed;
    resumed.restore(scaler.scale(), scaler.finite_steps());
    EXPECT_EQ(resumed.scale(), 4);
  });
}

// Once the scale is 1 the gradients are bad by themselves, and halving on for ever would hide it.
TEST(LossScalerTest, LeavesWhatIsBadByItselfToThePolicy) {
  run_ranks(2, [](const Context& context) {
    const auto model = make_model();
    Engine engine = shard(context, model, {.units = units<torch::nn::Linear>()});
    Optimizer optimizer = engine.optimizer(AdamW{});
    LossScaler scaler({.initial_scale = 4});
    const auto backward = [&] {
      const Batch batch = function_batch(0);
      scaler.scale(model->loss(batch.input, batch.target) * kInfinity).backward();
    };
    for (int i = 0; i < 2; ++i) {
      backward();
      EXPECT_TRUE(optimizer.step({.scaler = &scaler}).skipped);
    }
    EXPECT_EQ(scaler.scale(), 1);
    backward();
    EXPECT_THROW(optimizer.step({.scaler = &scaler}), Error);
  });
}

TEST(LossScalerTest, RefusesValuesOutOfRangeByName) {
  const auto refusal = [](const LossScalerOptions& options) {
    return text_of<InvalidArgument>([&] { const LossScaler scaler(options); });
  };
  EXPECT_THAT(refusal({.initial_scale = 0}), ::testing::HasSubstr("initial_scale"));
  EXPECT_THAT(refusal({.growth_factor = 0.5}), ::testing::HasSubstr("growth_factor"));
  EXPECT_THAT(refusal({.backoff_factor = 1}), ::testing::HasSubstr("backoff_factor"));
  EXPECT_THAT(refusal({.growth_interval = 0}), ::testing::HasSubstr("growth_interval"));
}

}  // namespace
}  // namespace fsdp::testing
