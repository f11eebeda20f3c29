// Ranks that give the engine different options, optimizers or step terms: each is refused on every rank with the rank, what
// it gave and what rank 0 gave; nothing has changed, and the corrected call goes on with the bits of a run without.
#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <fsdp/testing.h>
#include <fsdp/torch_optimizer.h>

#include "tests/behaviour/function_model.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

ShardOptions per_linear() { return {.units = units<Linear>()}; }

using OptimizerSetup = std::function<Optimizer(Engine&)>;

OptimizerSetup adamw(AdamW options = {.lr = 1e-2}) {
  return [options](Engine& engine) { return engine.optimizer(options); };
}

// What one rank does otherwise than the others.
struct Odd {
  const char* name;
  std::vector<const char*> told;  // in the text of every rank: the odd rank's, then rank 0's
  std::function<void(ShardOptions&)> options{};
  OptimizerSetup optimizer{};
  std::function<void(Optimizer&)> before_step{};
  std::function<void(StepOptions&)> step{};
};
void PrintTo(const Odd& odd, std::ostream* out) { *out << odd.name; }

void train(FunctionModel& model, Optimizer& optimizer, const Context& context, int step, const StepOptions& options) {
  const Batch batch = part_of(function_batch(step), context.rank(), context.world_size());
  model.loss(batch.input, batch.target).backward();
  optimizer.step(options);
}

template <class Call>
void expect_refused(const Odd& odd, int odd_rank, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "ranks that differ were not told";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_THAT(text, AllOf(HasSubstr("rank " + std::to_string(odd_rank)), HasSubstr("rank 0 has")));
    for (const char* part : odd.told) EXPECT_THAT(text, HasSubstr(part));
  }
}

Tensors trained(const Context& context, const Odd* odd, int odd_rank) {
  const bool is_odd = odd != nullptr && context.rank() == odd_rank;
  const auto model = in_turn(make_plain_model);
  if (odd != nullptr && odd->options) {
    expect_refused(*odd, odd_rank, [&] {
      ShardOptions options = per_linear();
      if (is_odd) odd->options(options);
      shard(context, model, options);
    });
  }
  Engine engine = shard(context, model, per_linear());
  if (odd != nullptr && odd->optimizer) {
    expect_refused(*odd, odd_rank, [&] { (is_odd ? odd->optimizer : adamw())(engine); });
  }
  Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
  train(*model, optimizer, context, 0, {});
  if (odd != nullptr && (odd->before_step || odd->step)) {
    StepOptions terms{.max_grad_norm = 1};
    if (is_odd && odd->before_step) odd->before_step(optimizer);
    if (is_odd && odd->step) odd->step(terms);
    const Batch batch = part_of(function_batch(1), context.rank(), context.world_size());
    model->loss(batch.input, batch.target).backward();
    expect_refused(*odd, odd_rank, [&] { optimizer.step(terms); });
    optimizer.set_lr(1e-2);
    optimizer.set_schedule({});
    optimizer.step({.max_grad_norm = 1});
  } else {
    train(*model, optimizer, context, 1, {.max_grad_norm = 1});
  }
  train(*model, optimizer, context, 2, {});
  return parameters_of(*model);
}

class RanksThatDiffer : public ::testing::TestWithParam<Odd> {};

TEST_P(RanksThatDiffer, AreToldAndGoOnWithTheSameCall) {
  for (const int world_size : {2, 3}) {
    Tensors expected;
    run_ranks(world_size, [&](const Context& context) {
      Tensors own = trained(context, nullptr, 0);
      if (context.is_main()) expected = std::move(own);
    });
    ASSERT_FALSE(expected.empty());
    run_ranks(world_size, [&](const Context& context) {
      for (const auto& [name, value] : trained(context, &GetParam(), world_size - 1))
        expect_equal(value, expected.at(name), 0, 0, name);
    });
  }
}

const auto kName = [](const auto& tested) { return std::string(tested.param.name); };

INSTANTIATE_TEST_SUITE_P(
    InOptions, RanksThatDiffer,
    ::testing::Values(
        Odd{"Prefetch", {"fsdp::shard", "prefetch 2,", "prefetch 1,"}, [](ShardOptions& o) { o.prefetch = 2; }},
        Odd{"OrderedSums", {"ordered_sums true", "ordered_sums false"}, [](ShardOptions& o) { o.ordered_sums = true; }},
        Odd{"UpdateInBackward",
            {"update_in_backward true", "update_in_backward false"},
            [](ShardOptions& o) { o.update_in_backward = true; }},
        Odd{"Strategy",
            {"strategy kShardGradients", "strategy kFullShard"},
            [](ShardOptions& o) { o.strategy = Strategy::kShardGradients; }},
        Odd{"ShardGroup", {"shards 1,", "shards "}, [](ShardOptions& o) { o.shard_group = 1; }},
        Odd{"Units", {"unit ", "unit a"}, [](ShardOptions& o) { o.units = units_named({"b"}); }},
        Odd{"ParamPrecision", {"param BF16", "param "}, [](ShardOptions& o) { o.precision.param = torch::kBFloat16; }},
        Odd{"ReducePrecision",
            {"reduce BF16", "reduce "},
            [](ShardOptions& o) { o.precision.reduce = torch::kBFloat16; }},
        Odd{"StrategyOfOneUnit",
            {"unit b strategy kReplicate", "unit b strategy kFullShard"},
            [](ShardOptions& o) {
              o.per_unit = [](const std::string& unit) -> std::optional<UnitOptions> {
                if (unit != "b") return std::nullopt;
                return UnitOptions{.strategy = Strategy::kReplicate};
              };
            }}),
    kName);

TorchOptimizer adam_of_shards() { return torch_optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-2)); }

INSTANTIATE_TEST_SUITE_P(
    InOptimizers, RanksThatDiffer,
    ::testing::Values(Odd{.name = "Kind",
                          .told = {"Engine::optimizer", "SGD.momentum 0", "AdamW.beta1 0.9"},
                          .optimizer = [](Engine& engine) { return engine.optimizer(SGD{.lr = 1e-2}); }},
                      Odd{.name = "AdamForAdamW",
                          .told = {"Adam.beta1", "AdamW.beta1"},
                          .optimizer = [](Engine& engine) { return engine.optimizer(Adam{.lr = 1e-2}); }},
                      Odd{.name = "Rate", .told = {"AdamW.lr 0.02", "AdamW.lr 0.01"}, .optimizer = adamw({.lr = 2e-2})},
                      Odd{.name = "Betas",
                          .told = {"AdamW.beta2 0.99 ", "AdamW.beta2 0.999"},
                          .optimizer = adamw({.lr = 1e-2, .betas = {0.9, 0.99}})},
                      Odd{.name = "GroupOfParameters",
                          .told = {"for b.weight lr_scale 0.5", "for b.weight lr_scale 1"},
                          .optimizer = adamw({.lr = 1e-2,
                                              .groups = {{.matches = [](const std::string& name,
                                                                        std::int64_t) { return name == "b.weight"; },
                                                          .lr_scale = 0.5}}})},
                      Odd{.name = "MuonForAdamW",
                          .told = {"Muon.lr", "AdamW.beta1"},
                          .optimizer = [](Engine& engine) { return engine.optimizer(Muon{}); }},
                      Odd{.name = "TorchForAdamW",
                          .told = {"TorchOptimizer.lr 0.01", "AdamW.beta1"},
                          .optimizer = [](Engine& engine) { return engine.optimizer(adam_of_shards()); }}),
    kName);

INSTANTIATE_TEST_SUITE_P(
    InSteps, RanksThatDiffer,
    ::testing::Values(Odd{.name = "SetLr",
                          .told = {"Optimizer::step 1", "lr 0.5", "lr 0.01", "nothing was updated"},
                          .before_step = [](Optimizer& optimizer) { optimizer.set_lr(0.5); }},
                      Odd{.name = "Schedule",
                          .told = {"lr 0.02", "lr 0.01"},
                          .before_step =
                              [](Optimizer& optimizer) { optimizer.set_schedule([](std::int64_t) { return 2.0; }); }},
                      Odd{.name = "ClipNorm",
                          .told = {"max_grad_norm 2", "max_grad_norm 1"},
                          .step = [](StepOptions& terms) { terms.max_grad_norm = 2; }},
                      Odd{.name = "ClipValueForNorm",
                          .told = {"max_grad_norm 0", "max_grad_norm 1"},
                          .step =
                              [](StepOptions& terms) {
                                terms.max_grad_norm.reset();
                                terms.max_grad_value = 1;
                              }},
                      Odd{.name = "NormType",
                          .told = {"norm_type 3", "norm_type 2"},
                          .step = [](StepOptions& terms) { terms.norm_type = 3; }},
                      Odd{.name = "OnNonFinite",
                          .told = {"on_non_finite 1", "on_non_finite 0"},
                          .step = [](StepOptions& terms) { terms.on_non_finite = OnNonFinite::kSkip; }}),
    kName);

// What the table above has no room for: options of one optimizer that visit_settings does not show.
TEST(RanksThatDifferInDetails, AreToldBeforeTheOptimizerIsMade) {
  const auto matrices_but = [](std::string left_out) {
    return [=](Engine& engine) {
      return engine.optimizer(Muon{.matches = [=](const std::string& name) { return name != left_out; }});
    };
  };
  const struct {
    OptimizerSetup odd, others;
    const char* told;
  } cases[] = {
      {[](Engine& e) { return e.optimizer(SGD{.momentum = 0.9, .nesterov = true}); },
       [](Engine& e) { return e.optimizer(SGD{.momentum = 0.9}); },
       "SGD.nesterov true where rank 0 has SGD.nesterov false"},
      {[](Engine& e) { return e.optimizer(Muon{.nesterov = false}); }, [](Engine& e) { return e.optimizer(Muon{}); },
       "Muon.nesterov false where rank 0 has Muon.nesterov true"},
      {matrices_but("a.weight"), matrices_but(""), "Muon for b.weight where rank 0 has Muon for a.weight"},
      {[](Engine& e) {
         return e.optimizer(TorchOptimizer{.make = [](const std::vector<ParameterShard>& shards) {
           std::vector<torch::optim::OptimizerParamGroup> groups;
           for (const ParameterShard& shard : shards) groups.emplace_back(std::vector<at::Tensor>{shard.tensor});
           return std::make_unique<torch::optim::Adam>(groups, torch::optim::AdamOptions(1e-2));
         }});
       },
       [](Engine& e) { return e.optimizer(adam_of_shards()); }, "TorchOptimizer group 0 has 1 parameters, lr 0.01"},
      {[](Engine& e) { return e.optimizer(torch_optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2))); },
       [](Engine& e) { return e.optimizer(adam_of_shards()); },
       "TorchOptimizer is a torch::optim::AdamW where rank 0 has TorchOptimizer is a torch::optim::Adam"},
      {[](Engine& e) { return e.optimizer(SGD{.lr = -1}); }, [](Engine& e) { return e.optimizer(SGD{}); },
       "expected lr at least 0, got -1 where rank 0 has SGD.momentum 0"},
  };
  for (const auto& [odd, others, told] : cases) {
    run_ranks(2, [&](const Context& context) {
      const auto model = in_turn(make_plain_model);
      Engine engine = shard(context, model, per_linear());
      try {
        (context.is_main() ? others : odd)(engine);
        ADD_FAILURE() << told;
      } catch (const InvalidArgument& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1 has another optimizer"), HasSubstr(told)));
      }
    });
  }
}

TEST(RanksThatDifferInDetails, AreToldOfScalersAveragesAndSettingsThatOneResumes) {
  const TempDir dir;
  run_ranks(2, [&](const Context& context) {
    const bool odd = !context.is_main();
    const auto told = [&](const char* part, const auto& call) {
      try {
        call();
        ADD_FAILURE() << part;
      } catch (const InvalidArgument& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1"), HasSubstr(part)));
      }
    };
    const auto model = in_turn(make_plain_model);
    Engine engine = shard(context, model, per_linear());
    Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
    engine.save(dir / "checkpoints");
    optimizer.set_lr(0.25);
    told(
        "Engine::resume: rank 1 has other optimizer settings than rank 0: AdamW.lr 0.25 where rank 0 has AdamW.lr 0.01",
        [&] { engine.resume(dir / "checkpoints", {.optimizer_settings = !odd}); });
    engine.resume(dir / "checkpoints");
    LossScaler scaler(LossScalerOptions{.initial_scale = odd ? 4.0 : 2.0});
    told("a loss scale of 4 where rank 0 has a loss scale of 2",
         [&] { train(*model, optimizer, context, 0, {.scaler = &scaler}); });
    engine.keep_ema({.decay = odd ? 0.5 : 0.75});
    told("an average of decay 0.5 where rank 0 has an average of decay 0.75",
         [&] { train(*model, optimizer, context, 1, {}); });
  });
}

// Units that backward has passed are updated already.
TEST(RanksThatDifferInDetails, WithUpdateInBackwardAreSentToTheCheckpoint) {
  run_ranks(2, [&](const Context& context) {
    const auto model = in_turn(make_plain_model);
    ShardOptions options = per_linear();
    options.update_in_backward = true;
    Engine engine = shard(context, model, options);
    Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
    if (!context.is_main()) optimizer.set_lr(0.5);
    try {
      train(*model, optimizer, context, 0, {});
      ADD_FAILURE();
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("rank 1 has lr 0.5 where rank 0 has lr 0.01"), HasSubstr("resume from")));
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
