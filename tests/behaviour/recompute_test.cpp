// Reentrant recomputation: a block that runs again in backward changes no bit, whatever is gathered ahead.
#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"
#include "tests/behaviour/reentrant.h"

namespace fsdp::testing {
namespace {

at::Tensor maybe_recomputed(bool recompute, RecomputedBlock block, const at::Tensor& x) {
  return recompute ? recomputed(std::move(block), x) : block(x);
}

// Five units in a row, each pair of them one block.
class BlockStack final : public LossModel {
 public:
  explicit BlockStack(bool recompute) : LossModel("BlockStack"), recompute_(recompute) {
    for (int i = 0; i < 5; ++i) layers->push_back(torch::nn::Linear(12, 12));
    register_module("layers", layers);
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    at::Tensor x = layer(0, input);
    for (const std::size_t first : {1U, 3U}) {
      x = maybe_recomputed(
          recompute_, [this, first](const at::Tensor& in) { return layer(first + 1, layer(first, in)); }, x);
    }
    return at::mse_loss(x, target);
  }

 private:
  at::Tensor layer(std::size_t index, const at::Tensor& x) {
    return at::tanh(layers[index]->as<torch::nn::Linear>()->forward(x));
  }

  bool recompute_;
  torch::nn::ModuleList layers;
};

// The block holds a weight that is used outside of it too, so its gradient comes twice in one backward.
class TiedBlock final : public LossModel {
 public:
  explicit TiedBlock(bool recompute) : LossModel("TiedBlock"), recompute_(recompute) {
    tied = register_module("tied", torch::nn::Linear(12, 12));
    middle = register_module("middle", torch::nn::Linear(12, 12));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    const at::Tensor x = at::tanh(tied(input));
    const at::Tensor y = maybe_recomputed(
        recompute_, [this](const at::Tensor& in) { return at::tanh(tied(middle(in))); }, x);
    return at::mse_loss(at::linear(y, tied->weight), target);
  }

 private:
  bool recompute_;
  torch::nn::Linear tied{nullptr}, middle{nullptr};
};

template <class Model>
Training training_of(bool recompute) {
  Training training;
  training.make_model = [recompute] {
    at::manual_seed(21);
    return std::make_shared<Model>(recompute);
  };
  training.batch = [](int step) {
    auto generator = at::detail::createCPUGenerator(70 + static_cast<std::uint64_t>(step));
    return Batch{at::randn({12, 12}, generator), at::randn({12, 12}, generator)};
  };
  training.own_kernels = true;
  training.options.units = units<torch::nn::Linear>();
  return training;
}

class RecomputeTest : public ::testing::TestWithParam<int> {};  // world size

TEST_P(RecomputeTest, ChangesNoBitAtAnyPrefetch) {
  const Trace without = train_sharded(training_of<BlockStack>(false), GetParam());
  Training training = training_of<BlockStack>(true);
  for (const int prefetch : {0, 1, 2}) {
    training.options.prefetch = prefetch;
    expect_bit_equal(train_sharded(training, GetParam()), without);
  }
}

TEST_P(RecomputeTest, OfATiedWeightEqualsPlainAndIsTheSameAtAnyPrefetch) {
  Training training = training_of<TiedBlock>(true);
  training.options.prefetch = 0;
  const Trace on_demand = train_sharded(training, GetParam());
  expect_same(on_demand, train_plain(training_of<TiedBlock>(false)));
  for (const int prefetch : {1, 2}) {
    training.options.prefetch = prefetch;
    expect_bit_equal(train_sharded(training, GetParam()), on_demand);
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, RecomputeTest, ::testing::Values(1, 2, 3));

TEST(RecomputeBitsTest, OnOneRankGivesTheBitsOfPlainRecomputation) {
  expect_bit_equal(train_sharded(training_of<BlockStack>(true), 1), train_plain(training_of<BlockStack>(true)));
  expect_bit_equal(train_sharded(training_of<TiedBlock>(true), 1), train_plain(training_of<TiedBlock>(true)));
}

at::Tensor nested_blocks(FunctionModel& model, const at::Tensor& x, int depth) {
  if (depth == 0) return at::tanh(x.mm(model.w));
  return recomputed(
      [&model, depth](const at::Tensor& in) { return nested_blocks(model, at::tanh(in.mm(model.w)) + in, depth - 1); },
      x);
}

// Deeper than LibTorch nests on one thread, so that inner backwards move to threads of its pool.
TEST(RecomputeBitsTest, SurvivesBackwardsNestedDeeperThanOneThreadTakes) {
  Training training = function_training([](FunctionModel& m, const at::Tensor& x) {
    return nested_blocks(m, m.b(m.a(x).narrow(1, 0, FunctionModel::kWidth)), 70);
  });
  training.steps = 2;
  expect_bit_equal(train_sharded(training, 1), train_plain(training));
}

}  // namespace
}  // namespace fsdp::testing
