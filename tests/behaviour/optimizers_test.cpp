// LibTorch's own optimizers over shards, Muon on whole matrices, schedules: as plain LibTorch on whole tensors, at any
// number of ranks and under any strategy; saved by one world size and resumed by another.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "sharding/muon_optimizer.h"
#include "tests/behaviour/function_model.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

void run_backward(FunctionModel& model, int step, int rank = 0, int world_size = 1) {
  const Batch batch = part_of(function_batch(step), rank, world_size);
  model.loss(batch.input, batch.target).backward();
}

using MakeOptimizer = std::function<Optimizer(Engine&)>;

// Steps [first, last); saves into or resumes from `dir` where it is given.
Tensors train(int world_size, const ShardOptions& base, const MakeOptimizer& make, int first, int last,
              const std::filesystem::path& dir = {}, const StepOptions& step_options = {}) {
  Tensors values;
  ShardOptions options = base;
  options.units = units_named({"a", "b"});
  run_ranks(world_size, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn(make_plain_model);
    Engine engine = shard(context, model, options);
    Optimizer optimizer = make(engine);
    if (first > 0) {
      ASSERT_EQ(engine.resume(dir), first);
    }
    for (int step = first; step < last; ++step) {
      run_backward(*model, step, context.rank(), world_size);
      optimizer.step(step_options);
    }
    if (first == 0 && !dir.empty()) engine.save(dir);
    const Tensors all = parameters_of(*model);
    if (context.is_main()) values = all;
  });
  return values;
}

void expect_near(const Tensors& actual, const Tensors& expected, double absolute = 2e-6, double relative = 2e-5) {
  for (const auto& [name, value] : expected) expect_equal(actual.at(name), value, absolute, relative, name);
}

const std::vector<ShardOptions>& strategies() {
  static const std::vector<ShardOptions> options{
      {}, {.strategy = Strategy::kReplicate}, {.strategy = Strategy::kShardOptimizer}, {.shard_group = 1}};
  return options;
}

struct TorchCell {
  const char* name;
  TorchOptimizer optimizer;
};
void PrintTo(const TorchCell& cell, std::ostream* out) { *out << cell.name; }

class TorchOptimizerTest : public ::testing::TestWithParam<TorchCell> {};

TEST_P(TorchOptimizerTest, EqualsPlainLibTorchAtAnyWorldSizeAndStrategy) {
  Tensors expected;
  {
    const auto model = make_plain_model();
    std::vector<ParameterShard> whole;
    for (const auto& item : model->named_parameters()) whole.push_back({item.key(), item.value()});
    const auto plain = GetParam().optimizer.make(whole);
    for (int step = 0; step < 5; ++step) {
      run_backward(*model, step);
      plain->step();
      plain->zero_grad();
    }
    expected = parameters_of(*model);
  }
  const MakeOptimizer make = [](Engine& engine) { return engine.optimizer(GetParam().optimizer); };
  expect_near(train(1, {}, make, 0, 5), expected, 0, 0);
  for (const int world_size : {2, 3, 4}) {
    for (const ShardOptions& options : strategies()) expect_near(train(world_size, options, make, 0, 5), expected);
  }
}

TEST_P(TorchOptimizerTest, ResumesAtAnotherWorldSize) {
  const TempDir dir;
  const MakeOptimizer make = [](Engine& engine) { return engine.optimizer(GetParam().optimizer); };
  const Tensors whole = train(2, {}, make, 0, 6);
  train(2, {}, make, 0, 3, dir / "run");
  expect_near(train(2, {}, make, 3, 6, dir / "run"), whole, 0, 0);
  expect_near(train(3, {}, make, 3, 6, dir / "run"), whole);
  expect_near(train(1, {}, make, 3, 6, dir / "run"), whole);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, TorchOptimizerTest,
    ::testing::Values(
        TorchCell{"Adam", torch_optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).amsgrad(true))},
        TorchCell{"AdamW", torch_optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2))},
        TorchCell{"SGD",
                  torch_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true))},
        TorchCell{"PlainSGD", torch_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1))},
        TorchCell{
            "RMSprop",
            torch_optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).momentum(0.5).centered(true))},
        TorchCell{"Adagrad", torch_optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2))}),
    [](const auto& tested) { return std::string(tested.param.name); });

TEST(TorchOptimizerRulesTest, TakesMastersUnderMixedPrecisionClipsAndFollowsALearningRate) {
  const MakeOptimizer fused = [](Engine& engine) { return engine.optimizer(SGD{.lr = 0.1}); };
  const MakeOptimizer torch = [](Engine& engine) {
    return engine.optimizer(torch_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1)));
  };
  for (const StepOptions& options : {StepOptions{.max_grad_norm = 1e-3}, StepOptions{.max_grad_value = 1e-4}})
    expect_near(train(2, {}, torch, 0, 3, {}, options), train(2, {}, fused, 0, 3, {}, options));
  const auto scheduled = [](const MakeOptimizer& make) {
    return [make](Engine& engine) {
      Optimizer optimizer = make(engine);
      optimizer.set_lr(0.3);
      optimizer.set_schedule(step_decay(1, 0.5));
      return optimizer;
    };
  };
  expect_near(train(2, {}, scheduled(torch), 0, 3), train(2, {}, scheduled(fused), 0, 3));
  run_ranks(2, [](const Context& context) {
    const auto model = in_turn([] {
      at::manual_seed(5);
      return std::make_shared<FunctionModel>([](FunctionModel& m, const at::Tensor& x) {
        return plain_function(m, x.to(m.w.scalar_type())).to(at::kFloat);
      });
    });
    Engine engine = shard(context, model, {.units = units_named({"a", "b"}), .precision = {.param = at::kBFloat16}});
    Optimizer optimizer = engine.optimizer(torch_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.5)));
    const at::Tensor before = model->w.detach().clone();
    run_backward(*model, 0);
    optimizer.step();
    EXPECT_FALSE(at::equal(model->w.detach().clone(), before));
  });
}

// A user's own: sign descent. Its state is what it says.
class SignDescent final : public torch::optim::Optimizer {
 public:
  explicit SignDescent(std::vector<at::Tensor> tensors)
      : torch::optim::Optimizer(std::move(tensors), std::make_unique<torch::optim::SGDOptions>(0.01)) {
    for (const at::Tensor& tensor : param_groups()[0].params()) signs.push_back(at::zeros_like(tensor));
  }
  at::Tensor step(LossClosure) override {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < signs.size(); ++i) {
      const at::Tensor& tensor = param_groups()[0].params()[i];
      if (!tensor.grad().defined()) continue;
      signs[i].mul_(0.5).add_(tensor.grad().sign());
      tensor.sub_(signs[i], param_groups()[0].options().get_lr());
    }
    return {};
  }
  std::vector<at::Tensor> signs;
};

TEST(TorchOptimizerRulesTest, TakesAUsersOwnAndSavesTheStateThatItNames) {
  const auto make = [](const std::vector<ParameterShard>& shards) {
    std::vector<at::Tensor> tensors;
    for (const ParameterShard& shard : shards) tensors.push_back(shard.tensor);
    return std::make_unique<SignDescent>(tensors);
  };
  const auto state = [](torch::optim::Optimizer& optimizer, const ParameterShard& shard) {
    auto& own = dynamic_cast<SignDescent&>(optimizer);
    const auto& params = own.param_groups()[0].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (params[i].is_same(shard.tensor))
        return std::vector<std::pair<std::string, at::Tensor>>{{"sign", own.signs[i]}};
    }
    return std::vector<std::pair<std::string, at::Tensor>>{};
  };
  const MakeOptimizer named = [&](Engine& engine) {
    return engine.optimizer(TorchOptimizer{.make = make, .state = state});
  };
  const TempDir dir;
  const Tensors whole = train(2, {}, named, 0, 6);
  train(2, {}, named, 0, 3, dir / "run");
  expect_near(train(2, {}, named, 3, 6, dir / "run"), whole, 0, 0);
  run_ranks(2, [&](const Context& context) {
    const auto model = in_turn(make_plain_model);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    engine.optimizer(TorchOptimizer{.make = make});
    engine.memory();
    EXPECT_THAT(text_of<InvalidArgument>([&] { engine.save(dir / "unnamed"); }), HasSubstr("TorchOptimizer::state"));
  });
}

TEST(TorchOptimizerRulesTest, RefusesWhatAShardCannotDoByName) {
  run_ranks(2, [](const Context& context) {
    const auto model = in_turn(make_plain_model);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    EXPECT_THAT(text_of<InvalidArgument>(
                    [&] { engine.optimizer(torch_optimizer<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1))); }),
                HasSubstr("LBFGS"));
    EXPECT_THAT(text_of<InvalidArgument>([&] { engine.optimizer(TorchOptimizer{}); }), HasSubstr("make"));
    EXPECT_THAT(text_of<InvalidArgument>([&] {
                  engine.optimizer(
                      torch_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1).momentum(0.9).dampening(0.5)));
                }),
                HasSubstr("dampening"));
    const auto half = in_turn(make_plain_model);
    half->to(at::kBFloat16);
    Engine other = shard(context, half, {.units = units_named({"a", "b"})});
    EXPECT_THAT(text_of<InvalidArgument>(
                    [&] { other.optimizer(torch_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1))); }),
                AllOf(HasSubstr("BF16"), HasSubstr("precision.param")));
  });
}

TEST(OrthogonalizedTest, HasSingularValuesNearOne) {
  at::manual_seed(1);
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{16, 16}, {48, 16}, {16, 48}, {1, 9}, {7, 1}}) {
    const at::Tensor result = orthogonalized(at::randn(shape));
    EXPECT_EQ(result.sizes(), at::IntArrayRef(shape));
    const at::Tensor values = std::get<1>(at::linalg_svd(result.to(at::kDouble)));
    EXPECT_GT(values.min().item<double>(), 0.3);
    EXPECT_LT(values.max().item<double>(), 1.35);
  }
}

// By hand on whole tensors.
Tensors muon_by_hand(int steps) {
  const auto model = make_plain_model();
  std::map<std::string, at::Tensor> momenta;
  torch::optim::AdamW others({model->a->bias, model->b->bias}, torch::optim::AdamWOptions(1e-3));
  for (int step = 0; step < steps; ++step) {
    run_backward(*model, step);
    others.step();
    const at::NoGradGuard no_grad;
    for (const auto& item : model->named_parameters()) {
      const at::Tensor& p = item.value();
      if (p.dim() != 2) continue;
      at::Tensor& momentum = momenta.try_emplace(item.key(), at::zeros_like(p)).first->second;
      momentum.lerp_(p.grad(), 0.05);
      const at::Tensor direction = orthogonalized(p.grad().lerp(momentum, 0.95));
      const double scale = std::sqrt(std::max(1.0, static_cast<double>(p.size(0)) / static_cast<double>(p.size(1))));
      p.copy_(p * (1 - 0.02 * 0.1) - direction * (0.02 * scale));
    }
    model->zero_grad();
  }
  return parameters_of(*model);
}

TEST(MuonTest, EqualsTheRecipeOnWholeMatricesAtAnyWorldSizeAndStrategy) {
  const Tensors expected = muon_by_hand(4);
  const MakeOptimizer make = [](Engine& engine) { return engine.optimizer(Muon{.weight_decay = 0.1}); };
  for (const int world_size : {1, 2, 3, 4}) {
    for (const ShardOptions& options : strategies())
      expect_near(train(world_size, options, make, 0, 4), expected, 1e-5, 1e-4);
  }
}

TEST(MuonTest, KeepsEachMomentumOnOneRankAndResumesAtAnotherWorldSize) {
  const TempDir dir;
  const MakeOptimizer make = [](Engine& engine) { return engine.optimizer(Muon{}); };
  const Tensors whole = train(2, {}, make, 0, 6);
  for (const ShardOptions& options : strategies()) {
    const std::string name = "run" + std::to_string(&options - strategies().data());
    train(2, options, make, 0, 3, dir / name);
    expect_near(train(2, options, make, 3, 6, dir / name), whole, 1e-5, 1e-4);
    expect_near(train(3, {}, make, 3, 6, dir / name), whole, 1e-5, 1e-4);
  }
  run_ranks(3, [](const Context& context) {
    const auto model = in_turn(make_plain_model);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    engine.optimizer(Muon{.matches = [](const std::string& name) { return name != "w"; }});
    std::map<std::string, std::int64_t> owned;
    for (const ShardView& view : engine.shard_views()) {
      if (view.name.starts_with("momentum.")) owned[view.name] = view.end - view.begin;
      EXPECT_NE(view.name, "momentum.w");
    }
    ASSERT_EQ(owned.size(), 2U);
    for (auto& [name, numel] : owned) {
      context.communicator().all_reduce(reinterpret_cast<std::byte*>(&numel), 1, DType::kInt64, ReduceOp::kSum);
      EXPECT_EQ(numel, name == "momentum.a.weight" ? 3 * 16 * 16 : 16 * 16);
    }
  });
}

TEST(ScheduleTest, RisesAndFallsAsItsNameSays) {
  const Schedule cosine = warmup_cosine(4, 12, 0.1), linear = warmup_linear(0, 10), steps = step_decay(3, 0.5);
  EXPECT_DOUBLE_EQ(cosine(0), 0.25);
  EXPECT_DOUBLE_EQ(cosine(3), 1);
  EXPECT_DOUBLE_EQ(cosine(4), 1);
  EXPECT_DOUBLE_EQ(cosine(8), 0.55);
  EXPECT_DOUBLE_EQ(cosine(12), 0.1);
  EXPECT_DOUBLE_EQ(cosine(1000), 0.1);
  EXPECT_DOUBLE_EQ(linear(0), 1);
  EXPECT_DOUBLE_EQ(linear(5), 0.5);
  EXPECT_DOUBLE_EQ(steps(2), 1);
  EXPECT_DOUBLE_EQ(steps(3), 0.5);
  EXPECT_DOUBLE_EQ(steps(7), 0.25);
  EXPECT_THROW(warmup_cosine(5, 5), InvalidArgument);
  EXPECT_THROW(step_decay(0, 0.5), InvalidArgument);
}

TEST(ScheduleTest, GoesOnWhereAResumedRunWas) {
  const TempDir dir;
  const MakeOptimizer make = [](Engine& engine) {
    Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
    optimizer.set_schedule(warmup_cosine(2, 6));
    return optimizer;
  };
  const Tensors whole = train(2, {}, make, 0, 6);
  train(2, {}, make, 0, 3, dir / "run");
  expect_near(train(2, {}, make, 3, 6, dir / "run"), whole, 0, 0);
}

}  // namespace
}  // namespace fsdp::testing
