// What a rank holds, computed from numel by hand and measured by counting allocations.
#include <gtest/gtest.h>

#include <atomic>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "tests/support/counting_allocator.h"
#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

constexpr std::int64_t kLayers = 8, kWidth = 256, kBatchPerRank = 4;
constexpr std::size_t kFloat = 4;
// A Linear(256, 256): 65536 weights and 256 biases. Both are multiples of 16 elements, and 65792 splits evenly over 1,
// 2 and 4 ranks.
constexpr std::size_t kUnitNumel = kWidth * kWidth + kWidth;
constexpr std::size_t kModelNumel = kLayers * kUnitNumel;

std::shared_ptr<StackModel> make_stack() {
  at::manual_seed(3);
  return std::make_shared<StackModel>(kLayers, kWidth);
}

void run_backward(StackModel& model, const Batch& batch) { model.loss(batch.input, batch.target).backward(); }

// Bytes beyond parameters, gradients and two Adam states that plain LibTorch needs at its peak, with the gradients
// kept from step to step so that no more than them is alive between steps.
std::size_t plain_activation_bytes(CountingAllocator& allocator) {
  at::set_num_threads(1);
  const std::size_t before = allocator.live_bytes();
  const auto model = make_stack();
  const Batch batch = model->batch(kBatchPerRank, 5);
  run_backward(*model, batch);
  const std::size_t batch_bytes = 2 * kBatchPerRank * kWidth * kFloat;
  allocator.reset_peak();
  for (int step = 0; step < 4; ++step) {
    model->zero_grad(/*set_to_none=*/false);
    run_backward(*model, batch);
  }
  return allocator.peak_bytes() - before - 2 * kModelNumel * kFloat - batch_bytes;
}

class MemoryTest : public ::testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() { CountingAllocator::install(); }
};

// Ranks are threads of one process, so what is measured is the sum over ranks.
TEST_P(MemoryTest, PeakStaysWithinFivePercentOfTheSumOfItsParts) {
  const int world_size = GetParam();
  CountingAllocator& allocator = CountingAllocator::install();
  const std::size_t activations = plain_activation_bytes(allocator);

  // By hand: parameter shards, gradient shards, two Adam states, and at most three times the largest unit, per rank.
  const auto ranks = static_cast<std::size_t>(world_size);
  const std::size_t states = 4 * kModelNumel * kFloat / ranks;
  const std::size_t arena = 3 * kUnitNumel * kFloat;
  const std::size_t allowed = ranks * (states + arena);

  std::atomic<std::size_t> segment_bytes{0};
  RunRanksOptions ranks_options;
  ranks_options.on_record = [&](int, const CommunicatorRecord& record) {
    if (record.operation == "allocate") segment_bytes += record.bytes;
  };
  const std::size_t before = allocator.live_bytes();
  std::size_t peak = 0, after_backward = 0, before_backward = 0;
  run_ranks(
      world_size,
      [&](const Context& context) {
        at::set_num_threads(1);
        const std::shared_ptr<StackModel> model = in_turn(make_stack);
        const Batch batch = model->batch(kBatchPerRank, 5);
        Engine engine = shard(context, model, {.units = units<torch::nn::Linear>()});
        Optimizer optimizer = engine.optimizer(AdamW{});
        for (int step = 0; step < 5; ++step) {
          context.communicator().barrier();
          if (step == 1 && context.is_main()) allocator.reset_peak();
          context.communicator().barrier();
          if (step == 4 && context.is_main()) before_backward = allocator.live_bytes();
          context.communicator().barrier();
          run_backward(*model, batch);
          engine.gradient_views();
          context.communicator().barrier();
          if (step == 4 && context.is_main()) after_backward = allocator.live_bytes();
          // No full unit is resident and no full gradient held.
          EXPECT_EQ(engine.memory().resident_bytes, 0U);
          EXPECT_EQ(engine.memory().held_gradient_bytes, 0U);
          EXPECT_EQ(engine.memory().peak_overflow_bytes, 0U);
          optimizer.step();
        }
        context.communicator().barrier();
        if (context.is_main()) peak = allocator.peak_bytes();
        context.communicator().barrier();
      },
      ranks_options);

  const std::size_t batches = ranks * 2 * kBatchPerRank * kWidth * kFloat;
  segment_bytes -= ranks * kWidth * kWidth * kFloat;  // from which shard() handed out rank 0's weights; it is gone
  const std::size_t measured = peak - before + segment_bytes - ranks * activations - batches;
  EXPECT_LE(static_cast<double>(measured), 1.05 * static_cast<double>(allowed))
      << "measured " << measured << ", by hand " << allowed << ", activations of plain LibTorch " << activations
      << " per rank";
  EXPECT_GE(static_cast<double>(measured), 0.9 * static_cast<double>(allowed)) << "the measurement has lost something";
  // Backward leaves nothing behind but what was there before it: no gradient of a whole unit.
  EXPECT_LT(after_backward, before_backward + kUnitNumel * kFloat / 2);
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, MemoryTest, ::testing::Values(1, 2, 4));

}  // namespace
}  // namespace fsdp::testing
