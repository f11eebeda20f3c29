// Hybrid sharding: replicas of a few ranks, each of which holds a copy of the model between them. Gradients are summed
// in rank order over all ranks whatever the size of a replica, so every size gives the bits of full sharding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"
#include "tests/behaviour/reentrant.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Cell {
  int world_size, shard_group;
  const char* backend;
};
void PrintTo(const Cell& cell, std::ostream* out) {
  *out << cell.shard_group << " of " << cell.world_size << " ranks on " << cell.backend;
}

class HybridTest : public ::testing::TestWithParam<Cell> {
 protected:
  static Training in_replicas(Training training) {
    training.options.shard_group = GetParam().shard_group;
    training.ranks.backend = GetParam().backend;
    return training;
  }
  static Trace train(const Training& training) { return train_sharded(training, GetParam().world_size); }
  static void expect_bits_of_full_sharding(const Training& training) {
    expect_bit_equal(train(in_replicas(training)), train(training));
  }
};

TEST_P(HybridTest, EqualsPlainLibTorchAndHasTheBitsOfFullSharding) {
  const Training training = mixed_training();
  const Trace full = train(training);
  expect_same(full, train_plain(training));
  for (const int prefetch : {0, 1, 2}) {
    Training hybrid = in_replicas(training);
    hybrid.options.prefetch = prefetch;
    expect_bit_equal(train(hybrid), full);
  }
}

TEST_P(HybridTest, AccumulatesWithTheBitsOfFullSharding) {
  Training training = function_training();
  training.run_step = [](LossModel& model, const Batch& batch) {
    const at::Tensor loss = model.loss(batch.input, batch.target);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return loss.item<double>();
  };
  expect_bits_of_full_sharding(training);
}

// Every copy has the same bytes, although each rank drew its own values: in the parameters, and in the optimizer state
// after clipped steps.
TEST_P(HybridTest, KeepsEveryCopyTheSame) {
  run_ranks(GetParam().world_size,
            [](const Context& context) {
              at::set_num_threads(1);
              const auto model = in_turn([] { return std::make_shared<FunctionModel>(plain_function); });
              Engine engine = shard(context, model,
                                    {.units = units_named({"a", "b"}), .shard_group = GetParam().shard_group});
              Optimizer optimizer = engine.optimizer(AdamW{});
              for (int step = 0; step < 3; ++step) {
                if (step == 1) {
                  const at::NoGradGuard no_grad;
                  torch::nn::init::normal_(model->w);
                }
                const Batch batch = part_of(function_batch(step), context.rank(), context.world_size());
                model->loss(batch.input, batch.target).backward();
                EXPECT_GT(optimizer.step({.max_grad_norm = 0.01}).grad_norm, 0.01);
              }
              std::vector<std::byte> own;
              for (const ShardView& view : engine.shard_views()) {
                EXPECT_EQ(view.replica, context.rank() / GetParam().shard_group);
                own.insert(own.end(), view.data,
                           view.data + static_cast<std::size_t>(view.end - view.begin) * size_of(view.dtype));
              }
              // The owners of one share hold as many bytes; others may hold fewer.
              std::int64_t bytes = static_cast<std::int64_t>(own.size());
              context.communicator().all_reduce(reinterpret_cast<std::byte*>(&bytes), 1, DType::kInt64, ReduceOp::kMax);
              own.resize(static_cast<std::size_t>(bytes));
              std::vector<std::byte> all(own.size() * static_cast<std::size_t>(context.world_size()));
              context.communicator().all_gather(own, all);
              for (int rank = context.rank() % GetParam().shard_group; rank < context.world_size();
                   rank += GetParam().shard_group) {
                EXPECT_TRUE(std::equal(own.begin(), own.end(), all.begin() + rank * bytes)) << "rank " << rank;
              }
            },
            {.backend = GetParam().backend});
}

TEST_P(HybridTest, SavesOnceAndResumesAtAnyWorldSize) {
  const TempDir dir;
  const Training training = in_replicas(function_training());
  std::vector<Tensors> saved(1);
  run_ranks(GetParam().world_size,
            [&](const Context& context) {
              at::set_num_threads(1);
              const auto model = in_turn(training.make_model);
              Engine engine = shard(context, model, training.options);
              Optimizer optimizer = engine.optimizer(AdamW{});
              const Batch batch = part_of(function_batch(0), context.rank(), context.world_size());
              model->loss(batch.input, batch.target).backward();
              optimizer.step();
              engine.save(dir / "run");
              engine.consolidate(dir / "model.safetensors");
              const Tensors values = parameters_of(*model);
              if (context.is_main()) saved[0] = values;
            },
            {.backend = GetParam().backend});
  for (const auto& [world_size, shard_group] : {std::pair{1, 0}, {3, 0}, {4, 2}, {2, 1}}) {
    run_ranks(world_size, [&, group = shard_group](const Context& context) {
      const auto resumed = in_turn(training.make_model), loaded = in_turn(training.make_model);
      Engine engine = shard(context, resumed, {.units = units_named({"a", "b"}), .shard_group = group});
      engine.optimizer(AdamW{});
      ASSERT_EQ(engine.resume(dir / "run"), 1);
      Engine other = shard(context, loaded, {.units = units_named({"a", "b"}), .shard_group = group});
      other.load_consolidated(dir / "model.safetensors");
      const Tensors from_shards = parameters_of(*resumed), from_file = parameters_of(*loaded);
      for (const auto& [name, value] : saved[0]) {
        expect_equal(from_shards.at(name), value, 0, 0, name);
        expect_equal(from_file.at(name), value, 0, 0, name);
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, HybridTest,
                         ::testing::Values(Cell{2, 1, "thread"}, Cell{3, 1, "thread"}, Cell{4, 1, "thread"},
                                           Cell{4, 2, "thread"}, Cell{4, 4, "thread"}, Cell{1, 1, "thread"},
                                           Cell{4, 2, "shm"}, Cell{2, 1, "shm"}, Cell{4, 2, "tcp"}),
                         [](const auto& tested) {
                           return std::to_string(tested.param.shard_group) + "Of" +
                                  std::to_string(tested.param.world_size) + "On" +
                                  name_of_backend(tested.param.backend);
                         });

TEST(ShardGroupTest, ThatDoesNotDivideTheRanksIsRefusedOnEveryRank) {
  for (const int shard_group : {-1, 3, 8}) {
    run_ranks(4, [&](const Context& context) {
      const auto model = std::make_shared<FunctionModel>(plain_function);
      const std::string text = text_of<InvalidArgument>([&] { shard(context, model, {.shard_group = shard_group}); });
      EXPECT_THAT(text, AllOf(HasSubstr("shard_group"), HasSubstr("4 ranks"), HasSubstr(std::to_string(shard_group))));
    });
  }
}

TEST(ShardGroupTest, ThatDiffersBetweenRanksIsRefusedOnEveryRank) {
  run_ranks(4, [](const Context& context) {
    const auto model = in_turn([] { return std::make_shared<FunctionModel>(plain_function); });
    const std::string text = text_of<InvalidArgument>(
        [&] { shard(context, model, {.shard_group = context.rank() == 2 ? 2 : 4}); });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 2"), HasSubstr("options")));
  });
}

}  // namespace
}  // namespace fsdp::testing
