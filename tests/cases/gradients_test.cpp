// Gradients that come out wrong without an error: accumulation, the step itself, and graphs that overlap.
#include <gtest/gtest.h>

#include <ostream>

#include <ATen/ATen.h>

#include "tests/cases/case_support.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

// The loss is a factor times the sum of all weights, so each weight's gradient is the factor, exactly.
class WeightSum final : public LossModel {
 public:
  WeightSum() : LossModel("WeightSum") {
    first = register_module("first", Linear(5, 3));
    second = register_module("second", Linear(7, 2));
    lone = register_parameter("lone", at::randn({}));
  }
  at::Tensor loss(const at::Tensor& factors, const at::Tensor&) override {
    const at::Tensor sum = first->weight.sum() + first->bias.sum() + second->weight.sum() + second->bias.sum() + lone;
    return factors.mean() * sum;
  }
  Linear first{nullptr}, second{nullptr};
  at::Tensor lone;
};

Batch factors(double first, double increment) {
  const at::Tensor values = at::arange(6, at::kFloat) * increment + first;
  return {values, values};
}

Scenario accumulation(int micro_batches, double increment) {
  Scenario scenario{.make_model = seeded<WeightSum>(), .units = units<Linear>(), .optimizer = SGD{.lr = 0.25}};
  scenario.script = [=](Session& session) {
    session.see_parameters("start");
    for (int step = 0; step < 3; ++step) {
      for (int m = 0; m < micro_batches; ++m) {
        const Batch batch = session.part(factors(increment == 0 ? 1 : m, increment));
        session.model().loss(batch.input, batch.target).backward();
      }
      session.see_gradients("step " + std::to_string(step));
      session.step();
    }
    session.see_parameters("end");
  };
  return scenario;
}

// C02: the loss is the sum of the weights, over several micro-batches per step. Each adds 1 to the gradient of each
// weight: M in all, in every step. An accumulation that adds a buffer to itself, which a group of one rank invites,
// gives a power of two.
TEST(C02AccumulationOverMicroBatches, AddsEachExactlyOnce) {
  for (const int world_size : {1, 2, 3}) {
    for (const int micro_batches : {1, 2, 4, 7}) {
      SCOPED_TRACE("world size " + std::to_string(world_size) + ", micro-batches " + std::to_string(micro_batches));
      const Tensors seen = run_sharded(accumulation(micro_batches, 0), world_size);
      for (const std::string name : {"first.weight", "first.bias", "second.weight", "second.bias", "lone"}) {
        for (int step = 0; step < 3; ++step) {
          const at::Tensor& gradient = seen.at(gradient_name("step " + std::to_string(step), name));
          expect_equal(gradient, at::full_like(gradient, micro_batches), 0, 0, name);
        }
        const at::Tensor moved = seen.at(parameter_name("start", name)) - seen.at(parameter_name("end", name));
        expect_equal(moved, at::full_like(moved, 3 * 0.25 * micro_batches), 1e-5, 0, name);
      }
    }
  }
}

TEST(C02AccumulationOverMicroBatches, AveragesOverRanksThatDiffer) { expect_equals_reference(accumulation(5, 0.5)); }

class Mlp final : public RowModel {
 public:
  Mlp(std::int64_t in, std::int64_t hidden, std::int64_t out) : RowModel("Mlp") {
    first = register_module("first", Linear(in, hidden));
    second = register_module("second", Linear(hidden, out));
  }
  at::Tensor forward(const at::Tensor& x) override { return second(at::tanh(first(x))); }
  Linear first{nullptr}, second{nullptr};
};

struct Widths {
  std::int64_t in, hidden, out;
};

Scenario adamw_steps(const Widths& widths, int steps) {
  Scenario scenario{.make_model = seeded<Mlp>(widths.in, widths.hidden, widths.out),
                    .units = units<Linear>(),
                    .optimizer = AdamW{.lr = 1e-2, .weight_decay = 0}};
  scenario.script = [=](Session& session) {
    session.see_parameters("start");
    for (int step = 0; step < steps; ++step) {
      train(session, rows(12, widths.in, widths.out, 50 + static_cast<std::uint64_t>(step)),
            "step " + std::to_string(step));
    }
  };
  return scenario;
}

// C03: the gradients are right, yet the weights move too little, since the optimizer steps another copy than forward
// reads, or part of it. Adam's first step moves each weight by lr against the sign of its gradient, whatever the
// gradient's size.
TEST(C03AdamWStep, FirstMovesEachWeightByTheLearningRate) {
  for (const Widths widths : {Widths{8, 8, 8}, Widths{5, 7, 3}, Widths{33, 1, 17}}) {
    for (const int world_size : {1, 2, 3}) {
      const Tensors seen = run_sharded(adamw_steps(widths, 1), world_size);
      for (const std::string name : {"first.weight", "first.bias", "second.weight", "second.bias"}) {
        const at::Tensor& gradient = seen.at(gradient_name("step 0", name));
        const at::Tensor moved = seen.at(parameter_name("start", name)) - seen.at(parameter_name("step 0", name));
        const at::Tensor large = gradient.abs() > 1e-4;
        ASSERT_GT(large.sum().item<std::int64_t>(), gradient.numel() / 2) << name;
        expect_equal(moved.masked_select(large), 1e-2 * gradient.sign().masked_select(large), 1e-5, 0, name);
      }
    }
  }
}

TEST(C03AdamWStep, StaysEqualToTheReferenceForElevenSteps) {
  for (const Widths widths : {Widths{8, 8, 8}, Widths{5, 7, 3}}) expect_equals_reference(adamw_steps(widths, 11));
}

// k: forward of batch k; -k: its backward.
struct Order {
  const char* name;
  std::vector<int> events;
};
void PrintTo(const Order& value, std::ostream* stream) { *stream << value.name; }

class C07ForwardsBeforeBackwards : public ::testing::TestWithParam<Order> {};

Scenario overlapping_graphs(const Order& order, std::function<Batch(int)> batch) {
  Scenario scenario{.optimizer = SGD{.lr = 0.02}};
  scenario.script = [order, batch = std::move(batch)](Session& session) {
    for (int step = 0; step < 3; ++step) {
      const std::string when = "step " + std::to_string(step);
      std::map<int, at::Tensor> losses;
      for (const int event : order.events) {
        if (event < 0) {
          losses.at(-event).backward();
          continue;
        }
        const Batch part = session.part(batch(10 * step + event));
        losses[event] = session.model().loss(part.input, part.target);
        session.see_loss(when + ", batch " + std::to_string(event), losses[event]);
      }
      session.see_gradients(when);
      session.step();
    }
    session.see_parameters("end");
  };
  return scenario;
}

// C07: several forwards, then their backwards, in either order. One flag "gathered" per unit, where a count per pending
// graph is needed, leaves the second backward with freed weights. The gradients are the sum over the graphs. Batches
// differ in size.
TEST_P(C07ForwardsBeforeBackwards, GiveTheSumOfTheirGradients) {
  Scenario scenario = overlapping_graphs(
      GetParam(), [](int k) { return MixedModel::batch(k % 2 == 0 ? 12 : 6, static_cast<std::uint64_t>(k)); });
  scenario.make_model = seeded<MixedModel>();
  scenario.units = units<Block, torch::nn::LSTM, torch::nn::Conv1d>();
  expect_equals_reference(scenario);
}

TEST_P(C07ForwardsBeforeBackwards, GiveTheSumOfTheirGradientsOnDemand) {
  Scenario scenario = overlapping_graphs(
      GetParam(), [](int k) { return rows(k % 2 == 0 ? 18 : 6, 11, 11, static_cast<std::uint64_t>(k)); });
  scenario.make_model = seeded<StackModel>(4, 11);
  scenario.units = units<Linear>();
  scenario.prefetch = 0;
  expect_equals_reference(scenario);
}

INSTANTIATE_TEST_SUITE_P(Orders, C07ForwardsBeforeBackwards,
                         ::testing::Values(Order{"InOrder", {1, 2, -1, -2}}, Order{"Reversed", {1, 2, -2, -1}},
                                           Order{"ThreeMixed", {1, 2, 3, -2, -3, -1}},
                                           Order{"Interleaved", {1, 2, -2, 3, -1, -3}}),
                         [](const auto& test) { return test.param.name; });

enum class Clearing { kNone, kOptimizer, kModuleToNone, kModuleToZero };

Scenario two_losses(Clearing clearing) {
  Scenario scenario{.make_model = seeded<StackModel>(3, 10), .units = units<Linear>()};
  scenario.script = [clearing](Session& session) {
    for (int step = 0; step < 3; ++step) {
      const std::string when = "step " + std::to_string(step);
      const Batch batch = session.part(rows(12, 10, 10, 70 + static_cast<std::uint64_t>(step)));
      const at::Tensor output = session.model_as<StackModel>().forward(batch.input);
      const at::Tensor first = at::mse_loss(output, batch.target), second = output.pow(4).mean();
      first.backward({}, /*retain_graph=*/true);
      if (clearing != Clearing::kNone) session.see_gradients(when + ", first");
      if (clearing == Clearing::kOptimizer) session.zero_grad();
      if (clearing == Clearing::kModuleToNone) session.model().zero_grad(/*set_to_none=*/true);
      if (clearing == Clearing::kModuleToZero) session.model().zero_grad(/*set_to_none=*/false);
      second.backward({}, /*retain_graph=*/true);
      session.see_gradients(when + ", second");
      (first + second).backward();
      session.see_gradients(when + ", all");
      session.step();
    }
    session.see_parameters("end");
  };
  return scenario;
}

// C08: two losses on one forward. The graph is retained by the first backward, the gradients are cleared, and the
// second backward uses it again. Hooks that fire once, or a reset at the end of the first backward, break it. Clearing
// is done in every way LibTorch knows.
TEST(C08SecondBackwardOverARetainedGraph, AddsToTheFirstWhereNothingIsCleared) {
  expect_equals_reference(two_losses(Clearing::kNone));
}
TEST(C08SecondBackwardOverARetainedGraph, StandsAloneAfterTheOptimizersZeroGrad) {
  expect_equals_reference(two_losses(Clearing::kOptimizer));
}
TEST(C08SecondBackwardOverARetainedGraph, StandsAloneAfterTheModulesZeroGrad) {
  expect_equals_reference(two_losses(Clearing::kModuleToNone));
}
TEST(C08SecondBackwardOverARetainedGraph, StandsAloneAfterZeroingInPlace) {
  expect_equals_reference(two_losses(Clearing::kModuleToZero));
}

}  // namespace
}  // namespace fsdp::testing
