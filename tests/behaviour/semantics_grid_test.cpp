// Every claimed cell: ranks x strategy x type x accumulation x recomputation, against plain LibTorch on whole batches.
// In bf16 the reference is the recipe by hand (fp32 masters, 16-bit copies): to the bit on one rank, to bf16's
// precision on several, and to the bit between cells that differ in recomputation only.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "sharding/optimizer_kernels.h"
#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

constexpr int kSteps = 3, kRows = 48;

struct Stage {
  const char* name;
  Strategy strategy;
  bool hybrid = false;
};
constexpr Stage kStages[] = {{"Replicate", Strategy::kReplicate},
                             {"Stage1", Strategy::kShardOptimizer},
                             {"Stage2", Strategy::kShardGradients},
                             {"Stage3", Strategy::kFullShard},
                             {"Hybrid", Strategy::kFullShard, true}};

struct Cell {
  at::ScalarType type = at::kFloat;
  int accumulation = 1;
  bool recomputes = false;
};

std::shared_ptr<FunctionModel> make_model(bool recomputes) {
  at::manual_seed(5);
  return std::make_shared<FunctionModel>([recomputes](FunctionModel& model, const at::Tensor& x) {
    const auto block = [&model](const at::Tensor& in) {
      return at::tanh(model.b(at::tanh(model.a(in)).narrow(1, 5, FunctionModel::kWidth)));
    };
    const at::Tensor input = x.to(model.w.scalar_type());
    return (recomputes ? recompute(block, input) : block(input)).matmul(model.w).to(at::kFloat);
  });
}

Batch batch_of(int step) {
  auto generator = at::detail::createCPUGenerator(900 + static_cast<std::uint64_t>(step));
  return {at::randn({kRows, FunctionModel::kWidth}, generator), at::randn({kRows, FunctionModel::kWidth}, generator)};
}

double run_micro_batches(FunctionModel& model, const Batch& batch, int accumulation) {
  double sum = 0;
  for (int i = 0; i < accumulation; ++i) {
    const Batch part = part_of(batch, i, accumulation);
    const at::Tensor loss = model.loss(part.input, part.target) / accumulation;
    loss.backward();
    sum += loss.item<double>();
  }
  return sum;
}

struct Outcome {
  std::vector<double> losses;
  Tensors weights;  // masters
};

// Gradients of micro-batches are added in fp32, as the engine does.
Outcome train_by_hand(const Cell& cell) {
  at::set_num_threads(1);
  const auto model = make_model(/*recomputes=*/false);
  std::map<std::string, at::Tensor> masters, gradients;
  for (const auto& item : model->named_parameters()) masters[item.key()] = item.value().detach().clone();
  model->to(cell.type);
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    double loss = 0;
    gradients.clear();
    for (int i = 0; i < cell.accumulation; ++i) {
      const Batch part = part_of(batch_of(step), i, cell.accumulation);
      const at::Tensor value = model->loss(part.input, part.target) / cell.accumulation;
      value.backward();
      loss += value.item<double>();
      for (const auto& item : model->named_parameters()) {
        const at::Tensor gradient = item.value().grad().to(at::kFloat);
        at::Tensor& sum = gradients[item.key()];
        sum = sum.defined() ? sum + gradient : gradient.clone();
        item.value().mutable_grad().reset();
      }
    }
    outcome.losses.push_back(loss);
    const at::NoGradGuard no_grad;
    for (const auto& item : model->named_parameters()) {
      at::Tensor& master = masters.at(item.key());
      sgd_update({.parameter = static_cast<std::byte*>(master.mutable_data_ptr()),
                  .gradient = static_cast<const std::byte*>(gradients.at(item.key()).const_data_ptr()),
                  .numel = master.numel()},
                 {.lr = 0.5});
      item.value().copy_(master);
    }
  }
  outcome.weights = masters;
  return outcome;
}

Outcome train_with_engine(const Cell& cell, const Stage& stage, int world_size) {
  Outcome outcome;
  run_ranks(world_size, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn([&] { return make_model(cell.recomputes); });
    Engine engine = shard(context, model,
                          {.units = units_named({"a", "b"}),
                           .strategy = stage.strategy,
                           .shard_group = stage.hybrid && world_size % 2 == 0 ? world_size / 2
                                          : stage.hybrid                      ? 1
                                                                              : 0,
                           .precision = {.param = cell.type}});
    Optimizer optimizer = engine.optimizer(SGD{.lr = 0.5});
    std::vector<double> losses;
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = part_of(batch_of(step), context.rank(), world_size);
      losses.push_back(context.mean(run_micro_batches(*model, batch, cell.accumulation)));
      optimizer.step();
    }
    const Tensors weights = assemble(context, [&] {
      std::vector<ShardView> views = engine.shard_views();
      std::erase_if(views, [](const ShardView& view) { return view.kind != ShardKind::kParameter; });
      return views;
    }());
    if (context.is_main()) outcome = {losses, weights};
  });
  return outcome;
}

class SemanticsGridTest : public ::testing::TestWithParam<std::tuple<int, Stage>> {};
void PrintTo(const Stage& stage, std::ostream* out) { *out << stage.name; }

void expect_near(const Outcome& actual, const Outcome& expected, double absolute, double relative) {
  for (int step = 0; step < kSteps; ++step) {
    const double loss = expected.losses[static_cast<std::size_t>(step)];
    EXPECT_NEAR(actual.losses[static_cast<std::size_t>(step)], loss, absolute + relative * std::abs(loss));
  }
  for (const auto& [name, weight] : expected.weights)
    expect_equal(actual.weights.at(name), weight, absolute, relative, name);
}

TEST_P(SemanticsGridTest, EqualsItsReferenceInEveryCell) {
  const auto& [world_size, stage] = GetParam();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const int accumulation : {1, 4}) {
      const Cell cell{.type = type, .accumulation = accumulation};
      const Outcome reference = train_by_hand(cell), actual = train_with_engine(cell, stage, world_size);
      const bool exact = world_size == 1;
      if (type == at::kFloat) {
        expect_near(actual, reference, exact ? 0 : 1e-6, exact ? 0 : 1e-5);
      } else {
        expect_near(actual, reference, exact ? 0 : 2e-3, exact ? 0 : 1e-2);
      }
      Cell again = cell;
      again.recomputes = true;
      expect_near(train_with_engine(again, stage, world_size), actual, 0, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, SemanticsGridTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::ValuesIn(kStages)),
                         [](const auto& tested) {
                           return std::string(std::get<1>(tested.param).name) + "On" +
                                  std::to_string(std::get<0>(tested.param));
                         });

// Engines of all strategies in one process, in turn and over the same ranks: a generator and its critic.
TEST(EnginesOfDifferentStrategiesTest, TrainInTurnAsTheirPlainTwins) {
  const auto loss_of = [](FunctionModel& generator, FunctionModel& critic, const Batch& batch) {
    const at::Tensor made = plain_function(generator, batch.input);
    return plain_function(critic, made).square().mean() + at::mse_loss(made, batch.target);
  };
  const auto make = [] { return make_model(false); };
  const auto generator = make(), critic = make();
  for (int step = 0; step < 4; ++step) {
    FunctionModel& trained = step % 2 == 0 ? *generator : *critic;
    loss_of(*generator, *critic, batch_of(step)).backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : trained.parameters()) p.sub_(p.grad(), 0.1);
    generator->zero_grad();
    critic->zero_grad();
  }
  const Tensors expected_generator = parameters_of(*generator), expected_critic = parameters_of(*critic);
  for (const Stage& first : kStages) {
    for (const Stage& second : {kStages[0], kStages[2], kStages[3]}) {
      run_ranks(2, [&](const Context& context) {
        at::set_num_threads(1);
        const auto a = in_turn(make), b = in_turn(make);
        Engine of_a = shard(context, a, {.units = units_named({"a", "b"}), .strategy = first.strategy});
        Engine of_b = shard(context, b, {.units = units_named({"a", "b"}), .strategy = second.strategy});
        Optimizer step_a = of_a.optimizer(SGD{.lr = 0.1}), step_b = of_b.optimizer(SGD{.lr = 0.1});
        for (int step = 0; step < 4; ++step) {
          loss_of(*a, *b, part_of(batch_of(step), context.rank(), 2)).backward();
          (step % 2 == 0 ? step_a : step_b).step();
          (step % 2 == 0 ? step_b : step_a).zero_grad();
        }
        for (const auto& [name, value] : parameters_of(*a))
          expect_equal(value, expected_generator.at(name), 2e-6, 2e-5, name);
        for (const auto& [name, value] : parameters_of(*b))
          expect_equal(value, expected_critic.at(name), 2e-6, 2e-5, name);
      });
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
