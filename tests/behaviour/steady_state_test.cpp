// From the second step on nothing is allocated, and every gather and reduction has the address it had before: read off
// the records of the communicator.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <tuple>

#include <ATen/ATen.h>

#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

struct Call {
  std::string operation, label;
  const void* output;
  std::size_t bytes;
  auto operator<=>(const Call&) const = default;
};

// Calls of each rank and step; gathers and reductions apart, since a reduction begins when the last peer is ready, and
// each of them sorted, since a small unit may overtake a large one.
using StepCalls = std::vector<std::map<std::string, std::vector<Call>>>;

class SteadyStateTest : public ::testing::TestWithParam<std::tuple<int, int, std::string>> {};

TEST_P(SteadyStateTest, EveryStepAfterTheSecondRepeatsItsCallsAndAddresses) {
  const auto [world_size, prefetch, backend] = GetParam();
  constexpr int kSteps = 6;
  std::mutex mutex;
  std::vector<StepCalls> calls(static_cast<std::size_t>(world_size), StepCalls(kSteps + 1));
  std::vector<std::size_t> step_of(static_cast<std::size_t>(world_size));
  Training training;
  training.make_model = [] {
    at::manual_seed(7);
    return std::make_shared<MixedModel>();
  };
  training.options.units = units<Block, torch::nn::LSTM>();
  training.options.prefetch = prefetch;
  training.ranks.backend = backend;
  training.ranks.on_record = [&](int rank, const CommunicatorRecord& record) {
    const std::lock_guard lock(mutex);
    const auto r = static_cast<std::size_t>(rank);
    calls[r][std::min<std::size_t>(step_of[r], kSteps)][record.operation].push_back(
        {record.operation, record.label, record.output, record.bytes});
  };
  run_ranks(
      world_size,
      [&](const Context& context) {
        at::set_num_threads(1);
        const std::shared_ptr<LossModel> model = in_turn(training.make_model);
        Engine engine = shard(context, model, training.options);
        Optimizer optimizer = engine.optimizer(AdamW{});
        for (int step = 0; step < kSteps; ++step) {
          const Batch batch = MixedModel::batch(4, static_cast<std::uint64_t>(step));
          model->loss(batch.input, batch.target).backward();
          optimizer.step();
          const std::lock_guard lock(mutex);
          ++step_of[static_cast<std::size_t>(context.rank())];
        }
        EXPECT_EQ(engine.memory().overflows, 0) << "rank " << context.rank();
        EXPECT_EQ(engine.plan().timeline.front(), "(root)");
      },
      training.ranks);
  for (StepCalls& rank : calls) {
    for (auto& step : rank) {
      for (auto& [operation, list] : step) std::sort(list.begin(), list.end());
    }
    for (std::size_t step = 1; step < kSteps; ++step) EXPECT_EQ(rank[step].count("allocate"), 0U) << "step " << step;
    for (std::size_t step = 2; step < kSteps; ++step) {
      for (const char* operation : {"gather", "reduce"}) {
        ASSERT_FALSE(rank[1].at(operation).empty());
        EXPECT_EQ(rank[step].at(operation), rank[1].at(operation)) << operation << " of step " << step;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, SteadyStateTest,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Values(0, 1, 2),
                                            ::testing::Values("thread", "shm", "tcp")));

}  // namespace
}  // namespace fsdp::testing
