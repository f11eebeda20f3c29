// no_sync(): gradients stay local until a backward outside of the scope, or the step.
#include <gtest/gtest.h>

#include <mutex>
#include <optional>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

struct Cell {
  Strategy strategy;
  int world_size;
  const char* backend = "thread";
};

class NoSyncTest : public ::testing::TestWithParam<Cell> {
 protected:
  static ShardOptions options() { return {.units = units_named({"a", "b"}), .strategy = GetParam().strategy}; }
};

// Four backwards a step; those that `within` says run in the scope. Returns the parameters after five steps.
Tensors train(const Cell& cell, const ShardOptions& options, const std::function<bool(int rank, int micro)>& within,
              std::map<std::string, int>* calls_of_last_step = nullptr) {
  constexpr int kSteps = 5;
  Tensors values;
  std::mutex mutex;
  bool is_last = false;
  RunRanksOptions ranks{.backend = cell.backend};
  ranks.on_record = [&](int rank, const CommunicatorRecord& record) {
    const std::lock_guard lock(mutex);
    if (is_last && rank == 0 && calls_of_last_step != nullptr) ++(*calls_of_last_step)[record.operation];
  };
  run_ranks(
      cell.world_size,
      [&](const Context& context) {
        at::set_num_threads(1);
        const auto model = in_turn(function_training().make_model);
        Engine engine = shard(context, model, options);
        Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1, .momentum = 0.5});
        { const NoSync first = engine.no_sync(); }  // the first scope is collective
        for (int step = 0; step < kSteps; ++step) {
          context.communicator().barrier();
          if (context.is_main()) {
            const std::lock_guard lock(mutex);
            is_last = step == kSteps - 1;
          }
          context.communicator().barrier();
          for (int micro = 0; micro < 4; ++micro) {
            std::optional<NoSync> scope;
            if (within(context.rank(), micro)) scope.emplace(engine.no_sync());
            const Batch batch = part_of(function_batch(step), context.rank(), context.world_size());
            model->loss(batch.input * (1 + micro), batch.target).backward();
          }
          optimizer.step({.max_grad_norm = 1.0});
        }
        const Tensors all = parameters_of(*model);
        if (context.is_main()) values = all;
      },
      ranks);
  return values;
}

void expect_near(const Tensors& actual, const Tensors& expected) {
  for (const auto& [name, value] : expected) expect_equal(actual.at(name), value, 1e-6, 1e-5, name);
}
void expect_same_bits(const Tensors& actual, const Tensors& expected) {
  for (const auto& [name, value] : expected) expect_equal(actual.at(name), value, 0, 0, name);
}

TEST_P(NoSyncTest, ReducesOnceAndGivesWhatEagerReductionsGive) {
  const Tensors eager = train(GetParam(), options(), [](int, int) { return false; });
  std::map<std::string, int> calls;
  const Tensors once = train(
      GetParam(), options(), [](int, int micro) { return micro < 3; }, &calls);
  expect_near(once, eager);
  EXPECT_EQ(calls["reduce"], 3) << "units";
  EXPECT_EQ(calls["allocate"], 0);
  // As a strategy that reduces once, and as a step that is in the scope to its end.
  ShardOptions replicated = options();
  replicated.strategy = Strategy::kReplicate;
  expect_same_bits(once, train(GetParam(), replicated, [](int, int) { return false; }));
  expect_same_bits(once, train(GetParam(), options(), [](int, int) { return true; }));
}

TEST_P(NoSyncTest, GivesTheSameInAnyOrder) {
  const Tensors eager = train(GetParam(), options(), [](int, int) { return false; });
  for (const int inside : {1, 2, 4, 5, 8, 10, 13}) {  // bit m: micro-batch m
    expect_near(train(GetParam(), options(), [&](int, int micro) { return (inside >> micro & 1) != 0; }), eager);
  }
}

TEST_P(NoSyncTest, MayDifferBetweenRanks) {
  const Tensors eager = train(GetParam(), options(), [](int, int) { return false; });
  expect_near(train(GetParam(), options(), [](int rank, int micro) { return micro % 3 == rank % 3; }), eager);
  expect_near(train(GetParam(), options(), [](int rank, int) { return rank == 0; }), eager);
}

TEST_P(NoSyncTest, MixesTypesWhereRanksDiffer) {
  ShardOptions narrow = options();
  if (GetParam().strategy == Strategy::kFullShard || GetParam().strategy == Strategy::kShardGradients)
    narrow.precision.reduce = at::kBFloat16;
  const Tensors eager = train(GetParam(), options(), [](int, int) { return false; });
  const Tensors mixed = train(GetParam(), narrow, [](int rank, int micro) { return rank == 1 && micro < 2; });
  for (const auto& [name, value] : eager) expect_equal(mixed.at(name), value, 3e-3, 3e-2, name);
}

std::string name_of_cell(const Cell& cell) {
  constexpr const char* kNames[] = {"Replicate", "ShardOptimizer", "ShardGradients", "FullShard"};
  return kNames[static_cast<int>(cell.strategy)] + std::string("On") + std::to_string(cell.world_size) +
         name_of_backend(cell.backend);
}

INSTANTIATE_TEST_SUITE_P(Grid, NoSyncTest,
                         ::testing::Values(Cell{Strategy::kFullShard, 1}, Cell{Strategy::kFullShard, 2},
                                           Cell{Strategy::kFullShard, 3}, Cell{Strategy::kFullShard, 2, "shm"},
                                           Cell{Strategy::kFullShard, 2, "tcp"}, Cell{Strategy::kShardGradients, 2},
                                           Cell{Strategy::kShardOptimizer, 2}, Cell{Strategy::kReplicate, 2}),
                         [](const auto& tested) { return name_of_cell(tested.param); });

// The whole gradients cost what the report says, from the first scope on.
TEST(NoSyncMemoryTest, IsAWholeGradientInFp32PerRank) {
  run_ranks(2, [](const Context& context) {
    const auto model = in_turn([] { return std::make_shared<StackModel>(3, 32); });
    Engine engine = shard(context, model, {.units = units<torch::nn::Linear>()});
    const MemoryReport before = engine.memory();
    EXPECT_EQ(before.no_sync_bytes, 0U);
    { const NoSync scope = engine.no_sync(); }
    EXPECT_EQ(engine.memory().no_sync_bytes, 3 * (32 * 32 + 32) * sizeof(float));
    EXPECT_EQ(engine.memory().total_bytes(), before.total_bytes() + engine.memory().no_sync_bytes);
  });
}

TEST(NoSyncMemoryTest, FreesUnitsAndHoldsNoGradientsWithinTheScope) {
  run_ranks(2, [](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn([] { return std::make_shared<StackModel>(6, 32); });
    Engine engine = shard(context, model, {.units = units<torch::nn::Linear>()});
    Optimizer optimizer = engine.optimizer(SGD{});
    for (int step = 0; step < 3; ++step) {
      const NoSync scope = engine.no_sync();
      for (int micro = 0; micro < 3; ++micro) {
        const Batch batch = model->batch(4, 1);
        model->loss(batch.input, batch.target).backward();
        EXPECT_EQ(engine.memory().held_gradient_bytes, 0U);
        EXPECT_LE(engine.memory().resident_bytes, 3 * (32 * 32 + 32) * sizeof(float));
      }
      optimizer.step();
    }
    EXPECT_EQ(engine.memory().overflows, 0);
  });
}

}  // namespace
}  // namespace fsdp::testing
