// Strategies: one engine, one table. At one accumulation they all have the same bits, since gradients are summed in
// rank order whatever is kept; what differs is memory, and what is gathered and reduced how often.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "tests/behaviour/function_model.h"
#include "tests/behaviour/reentrant.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Cell {
  Strategy strategy;
  int world_size;
  int shard_group = 0;
  const char* backend = "thread";
};

std::string name_of_cell(const Cell& cell) {
  constexpr const char* kNames[] = {"Replicate", "ShardOptimizer", "ShardGradients", "FullShard"};
  std::string name = kNames[static_cast<int>(cell.strategy)];
  if (cell.shard_group != 0) name += std::to_string(cell.shard_group);
  return name + "On" + std::to_string(cell.world_size) + name_of_backend(cell.backend);
}
void PrintTo(const Cell& cell, std::ostream* out) { *out << name_of_cell(cell); }

class StrategyTest : public ::testing::TestWithParam<Cell> {
 protected:
  static Training with_strategy(Training training) {
    training.options.strategy = GetParam().strategy;
    training.options.shard_group = GetParam().shard_group;
    training.ranks.backend = GetParam().backend;
    return training;
  }
  static Trace train(const Training& training) { return train_sharded(training, GetParam().world_size); }
  static bool reduces_once() {
    return GetParam().strategy == Strategy::kReplicate || GetParam().strategy == Strategy::kShardOptimizer;
  }
};

// `count` equal parts of the batch, one backward each, their losses averaged.
Training accumulating(Training training, int count) {
  training.run_step = [count](LossModel& model, const Batch& batch) {
    double sum = 0;
    for (int i = 0; i < count; ++i) {
      const Batch part = part_of(batch, i, count);
      const at::Tensor loss = model.loss(part.input, part.target) / count;
      loss.backward();
      sum += loss.item<double>();
    }
    return sum;
  };
  return training;
}

TEST_P(StrategyTest, EqualsPlainLibTorchAndHasTheBitsOfFullSharding) {
  const Training training = mixed_training();
  const Trace full = train(training);
  expect_same(full, train_plain(training));
  for (const int prefetch : {0, 1, 2}) {
    Training chosen = with_strategy(training);
    chosen.options.prefetch = prefetch;
    expect_bit_equal(train(chosen), full);
  }
}

TEST_P(StrategyTest, EqualsPlainLibTorchWhenItAccumulates) {
  // Divides each rank's part of 12 sequences.
  const Training training = accumulating(mixed_training(), GetParam().world_size == 3 ? 2 : 3);
  const Trace chosen = train(with_strategy(training));
  expect_same(chosen, train_plain(training));
  Training peer = training;
  if (reduces_once()) peer.options.strategy = Strategy::kShardOptimizer;
  expect_bit_equal(chosen, train(peer));
}

// One rank adds the micro-batches up as plain LibTorch does, whatever is reduced when.
TEST_P(StrategyTest, HasTheBitsOfPlainLibTorchOnOneRank) {
  Training training = accumulating(function_training(), 4);
  const Trace plain = train_plain(training);
  training.options.strategy = GetParam().strategy;
  expect_bit_equal(train_sharded(training, 1), plain);
}

// The number of backwards changes, so that what was planned as the last one is not, and later comes too late.
TEST_P(StrategyTest, FollowsAChangingNumberOfBackwards) {
  Training training = function_training();
  training.steps = 9;
  const auto count = std::make_shared<std::map<const LossModel*, int>>();
  const auto mutex = std::make_shared<std::mutex>();
  training.run_step = [count, mutex](LossModel& model, const Batch& batch) {
    constexpr int kBackwards[] = {2, 2, 4, 4, 4, 1, 3, 3, 2};
    int step = 0;
    {
      const std::lock_guard lock(*mutex);
      step = (*count)[&model]++;
    }
    double sum = 0;
    for (int i = 0; i < kBackwards[step % 9]; ++i) {
      const at::Tensor loss = model.loss(batch.input * (1 + i), batch.target);
      loss.backward();
      sum += loss.item<double>();
    }
    return sum;
  };
  expect_same(train(with_strategy(training)), train_plain(training));
}

// Each micro-batch uses other parameters: a round is as large as what came.
TEST_P(StrategyTest, AccumulatesOverBackwardsThatUseOtherParameters) {
  Training training = function_training([](FunctionModel& model, const at::Tensor& x) {
    return x.size(0) % 2 == 0 ? model.b(x) : model.a(x).narrow(1, 0, FunctionModel::kWidth).matmul(model.w);
  });
  training.run_step = [](LossModel& model, const Batch& batch) {
    double sum = 0;
    for (const int rows : {2, 1, 2, 1}) {
      const at::Tensor loss = model.loss(batch.input.narrow(0, 0, rows), batch.target.narrow(0, 0, rows));
      loss.backward();
      sum += loss.item<double>();
    }
    return sum;
  };
  // Parts of the batch that ranks do not share alike have no plain twin at more than one rank.
  if (GetParam().world_size == 1) {
    expect_same(train(with_strategy(training)), train_plain(training));
  } else {
    expect_same(train(with_strategy(training)), train(training));
  }
}

TEST_P(StrategyTest, RecomputesAndKeepsGraphsWithTheBitsOfFullSharding) {
  Training training = function_training([](FunctionModel& model, const at::Tensor& x) {
    const at::Tensor input = x.detach().requires_grad_(true);
    const at::Tensor hidden = recomputed([&model](const at::Tensor& y) { return at::tanh(model.a(y)); }, input);
    return model.b(hidden.narrow(1, 5, FunctionModel::kWidth)).matmul(model.w);
  });
  expect_bit_equal(train(with_strategy(training)), train(training));
}

// A parameter that only some ranks use counts as zero on the others; one that none uses is left alone.
TEST_P(StrategyTest, CountsWhatARankDoesNotUseAsZero) {
  const auto run = [&](const ShardOptions& options) {
    std::map<std::string, at::Tensor> values;
    run_ranks(GetParam().world_size,
              [&](const Context& context) {
                at::set_num_threads(1);
                const auto model = in_turn([] {
                  at::manual_seed(5);
                  return std::make_shared<FunctionModel>(plain_function);
                });
                Engine engine = shard(context, model, options);
                Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
                for (int step = 0; step < 4; ++step) {
                  const Batch batch = function_batch(step);
                  const at::Tensor x = batch.input + context.rank();
                  const at::Tensor y = context.rank() % 2 == step % 2 ? model->b(x) : x.matmul(model->w);
                  y.square().mean().backward();
                  optimizer.step();
                }
                const Tensors all = parameters_of(*model);
                if (context.is_main()) values = all;
              },
              {.backend = GetParam().backend});
    return values;
  };
  const Training training = function_training();
  const auto full = run(training.options), chosen = run(with_strategy(training).options);
  for (const auto& [name, value] : full) expect_equal(chosen.at(name), value, 0, 0, name);
}

// An operator that writes a parameter overwrites the owner's own share where whole parameters are kept.
TEST_P(StrategyTest, TakesInWhatOperatorsWrite) {
  run_ranks(GetParam().world_size,
            [](const Context& context) {
              const auto model = in_turn([] { return std::make_shared<FunctionModel>(plain_function); });
              Engine engine = shard(context, model, with_strategy(function_training()).options);
              const at::NoGradGuard no_grad;
              // Each rank writes its own values; those of the owner count. Then one rank alone changes one element.
              model->w.fill_(100.0 + context.rank());
              const at::Tensor owned = model->w.clone();
              const at::Tensor change = at::zeros_like(owned);
              if (context.rank() == context.world_size() - 1) change[3][5] = 1;
              model->w.add_(change);
              at::Tensor expected = owned.clone();
              expected[3][5] += 1;
              expect_equal(model->w.clone(), expected, 0, 0, "w");
              EXPECT_THROW(model->w.add_(at::ones({3})), std::exception);
              expect_equal(model->w.clone(), expected, 0, 0, "w after an operator that failed");
              EXPECT_GE(owned.min().item<double>(), 100);
              EXPECT_LT(owned.max().item<double>(), 100 + context.world_size());
            },
            {.backend = GetParam().backend});
}

TEST_P(StrategyTest, ShowsGradientsWithinAStepAndGoesOn) {
  Training training = function_training();
  const auto run = [&](const ShardOptions& options) {
    std::vector<Tensors> seen;
    run_ranks(GetParam().world_size,
              [&](const Context& context) {
                at::set_num_threads(1);
                const auto model = in_turn(training.make_model);
                Engine engine = shard(context, model, options);
                Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
                std::vector<Tensors> own;
                for (int step = 0; step < 4; ++step) {
                  const Batch batch = part_of(function_batch(step), context.rank(), context.world_size());
                  for (int i = 0; i < 3; ++i) {
                    model->loss(batch.input * (i + 1), batch.target).backward();
                    if (i < 2 && step != 1) own.push_back(assemble(context, engine.gradient_views()));
                  }
                  optimizer.step();
                  own.push_back(parameters_of(*model));
                }
                if (context.is_main()) seen = std::move(own);
              },
              {.backend = GetParam().backend});
    return seen;
  };
  const std::vector<Tensors> full = run(training.options), chosen = run(with_strategy(training).options);
  ASSERT_EQ(chosen.size(), full.size());
  for (std::size_t i = 0; i < full.size(); ++i) {
    ASSERT_EQ(chosen[i].size(), full[i].size());
    for (const auto& [name, value] : full[i]) expect_equal(chosen[i].at(name), value, 1e-6, 1e-5, name);
  }
}

TEST_P(StrategyTest, ClearsGradientsBetweenBackwards) {
  const Training training = function_training();
  run_ranks(GetParam().world_size,
            [&](const Context& context) {
              at::set_num_threads(1);
              const auto model = in_turn(training.make_model), reference = in_turn(training.make_model);
              Engine engine = shard(context, model, with_strategy(training).options);
              Engine other = shard(context, reference, training.options);
              Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1}), plain = other.optimizer(SGD{.lr = 0.1});
              for (int step = 0; step < 4; ++step) {
                const Batch batch = part_of(function_batch(step), context.rank(), context.world_size());
                model->loss(batch.input * 3, batch.target).backward();
                if (step % 2 == 0) {
                  optimizer.zero_grad();
                } else {
                  model->zero_grad(/*set_to_none=*/step == 1);
                }
                model->loss(batch.input, batch.target).backward();
                reference->loss(batch.input, batch.target).backward();
                optimizer.step();
                plain.step();
              }
              const Tensors expected = parameters_of(*reference);
              for (const auto& [name, value] : parameters_of(*model))
                expect_equal(value, expected.at(name), 0, 0, name);
            },
            {.backend = GetParam().backend});
}

// From the third step on: no allocation, whole parameters gathered once a step, and gradients reduced as often as the
// strategy says.
TEST_P(StrategyTest, GathersReducesAndAllocatesAsItsRowSays) {
  constexpr int kSteps = 5, kBackwards = 4;
  const Cell& cell = GetParam();
  const std::int64_t shares = cell.strategy == Strategy::kReplicate ? 1
                              : cell.shard_group != 0               ? cell.shard_group
                                                                    : cell.world_size;
  std::mutex mutex;
  std::map<std::string, int> last_step;
  std::vector<int> step_of(static_cast<std::size_t>(GetParam().world_size));
  RunRanksOptions ranks{.backend = GetParam().backend};
  ranks.on_record = [&](int rank, const CommunicatorRecord& record) {
    const std::lock_guard lock(mutex);
    if (rank == 0 && step_of[0] == kSteps - 1) ++last_step[record.operation + " " + record.label];
  };
  run_ranks(
      GetParam().world_size,
      [&](const Context& context) {
        at::set_num_threads(1);
        const auto model = in_turn([] { return std::make_shared<StackModel>(4, 16); });
        ShardOptions options = with_strategy({}).options;
        options.units = units<torch::nn::Linear>();
        Engine engine = shard(context, model, options);
        Optimizer optimizer = engine.optimizer(AdamW{});
        for (int step = 0; step < kSteps; ++step) {
          context.communicator().barrier();
          {
            const std::lock_guard lock(mutex);
            step_of[static_cast<std::size_t>(context.rank())] = step;
          }
          for (int i = 0; i < kBackwards; ++i) {
            const Batch batch = model->batch(4, static_cast<std::uint64_t>(step));
            model->loss(batch.input, batch.target).backward();
          }
          optimizer.step();
        }
        const MemoryReport memory = engine.memory();
        EXPECT_EQ(memory.overflows, 0);
        EXPECT_EQ(memory.held_gradient_bytes, 0U);
        // By hand: four units of 16 * 16 + 16 fp32, padded to a multiple of 64 bytes in each share.
        const auto share = static_cast<std::size_t>((272 + 16 * shares - 1) / (16 * shares) * 16 * 4);
        const std::size_t whole = share * static_cast<std::size_t>(shares);
        const bool keeps_parameters = cell.strategy != Strategy::kFullShard;
        EXPECT_EQ(memory.parameter_shard_bytes, 4 * (keeps_parameters ? whole : share));
        EXPECT_EQ(memory.gradient_shard_bytes, 4 * (reduces_once() ? whole : share));
        // State without a share's gaps: between the replicas all of it, in none more than a share.
        EXPECT_LE(memory.optimizer_bytes, 2 * 4 * share);
        auto states = static_cast<std::int64_t>(memory.optimizer_bytes);
        context.communicator().all_reduce(reinterpret_cast<std::byte*>(&states), 1, DType::kInt64, ReduceOp::kSum);
        EXPECT_EQ(states, 2 * 4 * 272 * 4 * cell.world_size / shares);
        EXPECT_EQ(memory.arena_bytes, whole * (reduces_once() ? 0 : keeps_parameters ? 2 : 3));
        EXPECT_EQ(memory.no_sync_bytes, 0U);
        context.communicator().barrier();
      },
      ranks);
  EXPECT_EQ(last_step["allocate "], 0);
  for (const std::string unit : {"layers.0", "layers.1", "layers.2", "layers.3"}) {
    EXPECT_EQ(last_step["reduce " + unit], reduces_once() ? 1 : kBackwards) << unit;
    const int gathers = last_step["gather " + unit];
    if (GetParam().strategy == Strategy::kFullShard) {
      EXPECT_GE(gathers, kBackwards) << unit;
    } else {
      EXPECT_EQ(gathers, shares == 1 ? 0 : 1) << unit;
    }
  }
}

TEST_P(StrategyTest, SavesWhatAnyOtherStrategyResumes) {
  const TempDir dir;
  const Training training = function_training();
  Tensors saved;
  const auto advance = [](const Context& context, FunctionModel& model, Optimizer& optimizer, int step) {
    const Batch batch = part_of(function_batch(step), context.rank(), context.world_size());
    model.loss(batch.input, batch.target).backward();
    optimizer.step();
  };
  const auto make = [&] { return std::static_pointer_cast<FunctionModel>(training.make_model()); };
  run_ranks(GetParam().world_size,
            [&](const Context& context) {
              at::set_num_threads(1);
              const auto model = in_turn(make);
              Engine engine = shard(context, model, with_strategy(training).options);
              Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
              for (int step = 0; step < 3; ++step) advance(context, *model, optimizer, step);
              engine.save(dir / "run");
              advance(context, *model, optimizer, 3);
              const Tensors values = parameters_of(*model);
              if (context.is_main()) saved = values;
            },
            {.backend = GetParam().backend});
  for (const Strategy strategy : kStrategies) {
    run_ranks(GetParam().world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const auto model = in_turn(make);
      Engine engine = shard(context, model, {.units = units_named({"a", "b"}), .strategy = strategy});
      Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
      const Batch batch = function_batch(9);  // something resident, and something pending, when it resumes
      model->loss(batch.input, batch.target).backward();
      ASSERT_EQ(engine.resume(dir / "run"), 3);
      advance(context, *model, optimizer, 3);
      for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, saved.at(name), 0, 0, name);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Grid, StrategyTest,
    ::testing::Values(Cell{Strategy::kReplicate, 1}, Cell{Strategy::kReplicate, 2}, Cell{Strategy::kReplicate, 3},
                      Cell{Strategy::kReplicate, 4}, Cell{Strategy::kShardOptimizer, 1},
                      Cell{Strategy::kShardOptimizer, 2}, Cell{Strategy::kShardOptimizer, 3},
                      Cell{Strategy::kShardOptimizer, 4}, Cell{Strategy::kShardGradients, 1},
                      Cell{Strategy::kShardGradients, 2}, Cell{Strategy::kShardGradients, 3},
                      Cell{Strategy::kShardGradients, 4}, Cell{Strategy::kFullShard, 2},
                      Cell{Strategy::kShardOptimizer, 4, 2}, Cell{Strategy::kShardGradients, 4, 2},
                      Cell{Strategy::kShardGradients, 3, 1}, Cell{Strategy::kFullShard, 4, 2},
                      Cell{Strategy::kReplicate, 2, 0, "shm"}, Cell{Strategy::kShardOptimizer, 2, 0, "shm"},
                      Cell{Strategy::kShardGradients, 2, 0, "shm"}, Cell{Strategy::kShardOptimizer, 4, 2, "shm"},
                      Cell{Strategy::kReplicate, 2, 0, "tcp"}, Cell{Strategy::kShardOptimizer, 3, 0, "tcp"},
                      Cell{Strategy::kShardGradients, 2, 0, "tcp"}, Cell{Strategy::kFullShard, 2, 0, "tcp"},
                      Cell{Strategy::kFullShard, 4, 2, "tcp"}),
    [](const auto& tested) { return name_of_cell(tested.param); });

// Every unit its own: none changes what another gets.
TEST(PerUnitStrategyTest, HasTheBitsOfFullShardingInAnyMixture) {
  const Training training = mixed_training();
  for (const int world_size : {1, 2, 4}) {
    const Trace full = train_sharded(training, world_size);
    for (int shift = 0; shift < 4; ++shift) {
      Training mixed = training;
      mixed.options.per_unit = [shift](const std::string& unit) -> std::optional<UnitOptions> {
        if (unit == "(root)" && shift < 2) return std::nullopt;
        return UnitOptions{
            .strategy =
                kStrategies[(unit.size() + static_cast<std::size_t>(unit.back()) + static_cast<std::size_t>(shift)) %
                            4]};
      };
      expect_bit_equal(train_sharded(mixed, world_size), full);
    }
  }
}

TEST(PerUnitStrategyTest, IsShownInThePlan) {
  run_ranks(2, [](const Context& context) {
    const auto model = in_turn([] { return std::make_shared<FunctionModel>(plain_function); });
    Engine engine = shard(context, model,
                          {.units = units_named({"a", "b"}),
                           .strategy = Strategy::kShardGradients,
                           .per_unit = [](const std::string& unit) -> std::optional<UnitOptions> {
                             if (unit == "a") return UnitOptions{.strategy = Strategy::kReplicate};
                             return std::nullopt;
                           }});
    std::map<std::string, std::pair<std::string, int>> shown;
    for (const UnitPlan& unit : engine.plan().units) shown[unit.name] = {unit.strategy, unit.shard_group};
    EXPECT_EQ(shown.at("a"), std::pair(std::string("kReplicate"), 1));
    EXPECT_EQ(shown.at("b"), std::pair(std::string("kShardGradients"), 2));
    EXPECT_THAT(engine.plan().to_string(), AllOf(HasSubstr("kReplicate"), HasSubstr("kShardGradients")));
  });
}

TEST(PerUnitStrategyTest, RefusesWhatHasNoMeaningOnEveryRank) {
  const auto refusal = [](ShardOptions options) {
    std::string text;
    run_ranks(2, [&](const Context& context) {
      const auto model = in_turn([] { return std::make_shared<FunctionModel>(plain_function); });
      const std::string own = text_of<InvalidArgument>([&] { shard(context, model, options); });
      if (context.is_main()) text = own;
    });
    return text;
  };
  EXPECT_THAT(refusal({.strategy = Strategy::kReplicate, .shard_group = 2}),
              AllOf(HasSubstr("shard_group 2"), HasSubstr("kReplicate"), HasSubstr("kShardOptimizer")));
  EXPECT_THAT(refusal({.strategy = Strategy::kShardOptimizer, .precision = {.reduce = at::kBFloat16}}),
              AllOf(HasSubstr("precision.reduce BFloat16"), HasSubstr("kShardOptimizer"), HasSubstr("kFullShard")));
  EXPECT_THAT(refusal({.precision = {.param = at::kDouble}}), AllOf(HasSubstr("precision.param"), HasSubstr("Double")));
  EXPECT_THAT(refusal({.per_unit = [](const std::string&) { return UnitOptions{.shard_group = 3}; }}),
              AllOf(HasSubstr("shard_group"), HasSubstr("2 ranks"), HasSubstr("got 3")));
}

}  // namespace
}  // namespace fsdp::testing
