// Ranks whose programs differ: units in another order, units that one rank alone uses, units that none does. Each
// gradient is the mean over all ranks, with zeros where a rank did not use the unit.
#include <future>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

constexpr std::int64_t kWidth = 12, kExperts = 4, kRowsPerRank = 6;

// Each row names its expert in column 0. A rank runs the experts of its own rows, in the order in which they appear.
class ExpertModel final : public LossModel {
 public:
  ExpertModel() : LossModel("ExpertModel") {
    experts = register_module("experts", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < kExperts; ++i) experts->push_back(torch::nn::Linear(kWidth, kWidth));
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    const at::Tensor expert_of = input.select(1, 0).to(at::kLong), x = input.narrow(1, 1, kWidth);
    at::Tensor output = at::zeros_like(target);
    std::vector<bool> done(static_cast<std::size_t>(kExperts));
    for (std::int64_t row = 0; row < expert_of.size(0); ++row) {
      const auto expert = static_cast<std::size_t>(expert_of[row].item<std::int64_t>());
      if (done[expert]) continue;
      done[expert] = true;
      const at::Tensor rows = (expert_of == static_cast<std::int64_t>(expert)).nonzero().squeeze(1);
      output = output.index_copy(0, rows,
                                 at::tanh(experts[expert]->as<torch::nn::Linear>()->forward(x.index_select(0, rows))));
    }
    return at::mse_loss(head(output), target);
  }
  torch::nn::ModuleList experts{nullptr};
  torch::nn::Linear head{nullptr};
};

// The expert of a rank's row in a step.
using Routing = std::int64_t (*)(int step, int rank, std::int64_t row);

std::int64_t rotated(int, int rank, std::int64_t row) { return (row + rank) % kExperts; }
std::int64_t reversed_on_odd_ranks(int, int rank, std::int64_t row) {
  return rank % 2 == 0 ? row % kExperts : kExperts - 1 - row % kExperts;
}
std::int64_t one_per_rank(int, int rank, std::int64_t) { return rank; }
std::int64_t changing(int step, int rank, std::int64_t row) {
  return (row * (1 + step % 2) + step * 3 + rank) % kExperts;
}
std::int64_t first_rank_alone(int, int rank, std::int64_t row) { return rank == 0 ? row % kExperts : 0; }

struct OrderCase {
  const char* name;
  Routing routing;
  const char* backend;
};
void PrintTo(const OrderCase& order, std::ostream* out) { *out << order.name << " on " << order.backend; }

Training expert_training(const OrderCase& order, int world_size) {
  Training training;
  training.make_model = [] {
    at::manual_seed(17);
    return std::make_shared<ExpertModel>();
  };
  training.batch = [order, world_size](int step) {
    auto generator = at::detail::createCPUGenerator(900 + static_cast<std::uint64_t>(step));
    at::Tensor input = at::randn({world_size * kRowsPerRank, 1 + kWidth}, generator);
    for (int rank = 0; rank < world_size; ++rank) {
      for (std::int64_t row = 0; row < kRowsPerRank; ++row)
        input[rank * kRowsPerRank + row][0] = static_cast<double>(order.routing(step, rank, row));
    }
    return Batch{input, at::randn({world_size * kRowsPerRank, kWidth}, generator)};
  };
  training.steps = 6;
  training.options.units = units<torch::nn::Linear>();
  training.ranks.backend = order.backend;
  training.ranks.timeout = std::chrono::seconds(20);
  return training;
}

class RankOrderTest : public ::testing::TestWithParam<OrderCase> {};

TEST_P(RankOrderTest, EndsWithTheMeanOverAllRanks) {
  for (const int world_size : {2, 3}) {
    const Training training = expert_training(GetParam(), world_size);
    expect_same(train_sharded(training, world_size), train_plain(training));
  }
}

// All experts in one unit: a rank's buffer then holds gradients of some of its parameters, and zeros for the others.
TEST_P(RankOrderTest, EndsWithTheMeanWhereAUnitIsUsedInParts) {
  for (const int world_size : {2, 3}) {
    Training training = expert_training(GetParam(), world_size);
    training.options.units = units_named({"experts", "head"});
    expect_same(train_sharded(training, world_size), train_plain(training));
  }
}

// A rank that lags at every gather or reduction meets buffers that others have long left.
TEST_P(RankOrderTest, IsTheSameWhenOneRankLags) {
  Training training = expert_training(GetParam(), 3);
  const Trace even = train_sharded(training, 3);
  for (const char* operation : {"gather", "reduce"}) {
    training.ranks.faults = {{.kind = Fault::Kind::kDelay,
                              .operation = operation,
                              .rank = 1,
                              .count = -1,
                              .delay = std::chrono::milliseconds(2)}};
    expect_bit_equal(train_sharded(training, 3), even);
  }
}

TEST_P(RankOrderTest, IsTheSameAtAnyPrefetch) {
  Training training = expert_training(GetParam(), 3);
  training.options.prefetch = 0;
  const Trace on_demand = train_sharded(training, 3);
  for (const int prefetch : {1, 2, 4}) {
    training.options.prefetch = prefetch;
    expect_bit_equal(train_sharded(training, 3), on_demand);
  }
}

TEST_P(RankOrderTest, HasTheSameBitsInReplicas) {
  Training training = expert_training(GetParam(), 4);
  const Trace full = train_sharded(training, 4);
  for (const int shard_group : {1, 2}) {
    training.options.shard_group = shard_group;
    expect_bit_equal(train_sharded(training, 4), full);
  }
}

// A rank is blocked where the engine cannot see it: it goes on only when its peer's backward is over. The peer waits
// for buffers to drain, loses patience and takes overflow buffers; the numbers are those of ranks that go together.
TEST(BlockedRankTest, CostsItsPeersMemoryAndNeverHangsThem) {
  const OrderCase order{"Rotated", rotated, "thread"};
  Training training = expert_training(order, 2);
  training.options = {.units = units_named({"experts.0", "head"}), .prefetch = 0};
  const Trace plain = train_plain(training);
  Trace trace;
  std::promise<void> backward_is_over;
  run_ranks(2, [&](const Context& context) {
    Training blocked = training;
    int step = 0;
    blocked.run_step = [&](LossModel& running, const Batch& batch) {
      const bool last = ++step == training.steps;
      if (last && !context.is_main()) backward_is_over.get_future().wait();
      const at::Tensor loss = running.loss(batch.input, batch.target);
      loss.backward();
      if (last && context.is_main()) backward_is_over.set_value();
      return loss.item<double>();
    };
    Trace own = train_rank(context, blocked, in_turn(training.make_model));
    if (context.is_main()) trace = std::move(own);
  });
  expect_same(trace, plain);
}

INSTANTIATE_TEST_SUITE_P(
    Routings, RankOrderTest,
    ::testing::Values(OrderCase{"Rotated", rotated, "thread"}, OrderCase{"Rotated", rotated, "shm"},
                      OrderCase{"Reversed", reversed_on_odd_ranks, "thread"},
                      OrderCase{"Reversed", reversed_on_odd_ranks, "shm"},
                      OrderCase{"OnePerRank", one_per_rank, "thread"}, OrderCase{"OnePerRank", one_per_rank, "shm"},
                      OrderCase{"Changing", changing, "thread"}, OrderCase{"Changing", changing, "shm"},
                      OrderCase{"FirstRankAlone", first_rank_alone, "thread"},
                      OrderCase{"FirstRankAlone", first_rank_alone, "shm"}, OrderCase{"Rotated", rotated, "tcp"},
                      OrderCase{"Reversed", reversed_on_odd_ranks, "tcp"}, OrderCase{"OnePerRank", one_per_rank, "tcp"},
                      OrderCase{"Changing", changing, "tcp"}, OrderCase{"FirstRankAlone", first_rank_alone, "tcp"}),
    [](const auto& tested) { return std::string(tested.param.name) + "On" + name_of_backend(tested.param.backend); });

}  // namespace
}  // namespace fsdp::testing
