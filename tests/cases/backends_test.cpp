// What an exchange has to come to, whatever carries it.
#include <atomic>

#include <gtest/gtest.h>

#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

// C01: gradients are the mean over ranks, and not the sum, on every backend. Each rank k feeds a row of (k+1), so the
// gradient of a weight is the mean of 1..W.
class C01Backends : public ::testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(C01Backends, GradientsAreTheMeanOverRanks) {
  const auto& [backend, world_size] = GetParam();
  std::atomic<std::int64_t> elements{0};
  run_ranks(world_size,
            [&elements, world_size = world_size](const Context& context) {
              const auto model = in_turn(
                  [] { return std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(4, 1).bias(false)); });
              Engine engine = shard(context, model);
              model->forward(at::full({1, 4}, static_cast<double>(context.rank() + 1))).sum().backward();
              for (const ShardView& view : engine.gradient_views()) {
                elements += view.end - view.begin;
                for (std::int64_t i = 0; i < view.end - view.begin; ++i)
                  EXPECT_EQ(reinterpret_cast<const float*>(view.data)[i], static_cast<float>(world_size + 1) / 2);
              }
            },
            {.backend = backend});
  EXPECT_EQ(elements, 4) << "of the weight, over all ranks";
}

INSTANTIATE_TEST_SUITE_P(, C01Backends,
                         ::testing::Combine(::testing::Values("thread", "shm", "tcp"), ::testing::Values(1, 2, 3, 4)),
                         [](const auto& tested) {
                           return name_of_backend(std::get<0>(tested.param)) +
                                  std::to_string(std::get<1>(tested.param));
                         });

}  // namespace
}  // namespace fsdp::testing
