// Sharded training equals the unsharded model: loss, gradients and weights.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

class ParityTest : public ::testing::TestWithParam<int> {};

TEST_P(ParityTest, LossGradientsAndSgdWeightsEqualPlainLibTorch) {
  const Training training = mixed_training();
  expect_same(train_sharded(training, GetParam()), train_plain(training));
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, ParityTest, ::testing::Values(1, 2, 3, 4));

// The bits of forward and backward, and of our optimizer on whole tensors.
TEST(ParityBitsTest, OneRankEqualsPlainForwardAndBackwardWithOurKernels) {
  for (const bool adamw : {false, true}) {
    Training training = mixed_training();
    training.adamw = adamw;
    training.own_kernels = true;
    expect_bit_equal(train_sharded(training, 1), train_plain(training));
  }
}

TEST(ParityBitsTest, OurAdamWEqualsTorchToRounding) {
  Training training = mixed_training();
  training.adamw = true;
  const Trace torch = train_plain(training);
  training.own_kernels = true;
  // Later steps start from weights that differ by rounding; a zero gradient's rounding becomes a step of lr (a key
  // bias).
  training.steps = 1;
  const Trace ours = train_plain(training);
  training.own_kernels = false;
  const Trace theirs = train_plain(training);
  for (const auto& [name, value] : theirs.parameters) {
    const at::Tensor large = theirs.gradients[0].at(name).abs() > 1e-5;
    expect_equal(at::where(large, ours.parameters.at(name), value), value, 1e-7, 1e-5, name);
  }
  ASSERT_EQ(torch.losses.size(), 5U);
}

TEST(ParityBitsTest, TwoRunsOfOneWorldSizeAreEqual) {
  for (const int world_size : {2, 3}) {
    const Training training = mixed_training();
    expect_bit_equal(train_sharded(training, world_size), train_sharded(training, world_size));
  }
}

TEST(ParityBitsTest, PrefetchChangesNoBit) {
  for (const int world_size : {1, 2, 3}) {
    Training training = mixed_training();
    training.adamw = true;
    training.options.prefetch = 0;
    const Trace on_demand = train_sharded(training, world_size);
    for (const int prefetch : {1, 2, 5}) {
      training.options.prefetch = prefetch;
      expect_bit_equal(train_sharded(training, world_size), on_demand);
    }
  }
}

TEST(ParityBitsTest, BackendsAreEqual) {
  Training training = mixed_training();
  training.adamw = true;
  const Trace threads = train_sharded(training, 2);
  for (const char* backend : {"shm", "tcp"}) {
    training.ranks.backend = backend;
    expect_bit_equal(train_sharded(training, 2), threads);
  }
}

}  // namespace
}  // namespace fsdp::testing
