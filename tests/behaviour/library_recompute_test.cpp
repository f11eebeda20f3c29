// fsdp::recompute: the bits of a plain call, dropout and autocast included, whatever requires grad.
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/dropout.h>

#include "tests/behaviour/function_model.h"
#include "tests/support/counting_allocator.h"

namespace fsdp::testing {
namespace {

// x through a, dropout and b; `mode` tells how: 0 plain, 1 recomputed, 2 nested, 3 every unit by itself.
at::Tensor network(FunctionModel& model, const at::Tensor& x, int mode) {
  const auto first = [&model](const at::Tensor& in) {
    return at::dropout(at::tanh(model.a(in)).narrow(1, 5, FunctionModel::kWidth), 0.4, /*train=*/true);
  };
  const auto second = [&model](const at::Tensor& in) { return at::dropout(model.b(in), 0.3, /*train=*/true); };
  switch (mode) {
    case 0: return second(first(x)).matmul(model.w);
    case 1: return recompute([first, second](const at::Tensor& in) { return second(first(in)); }, x).matmul(model.w);
    case 2:
      return recompute(
          [&model, first, second](const at::Tensor& in) { return recompute(second, first(in)).matmul(model.w); }, x);
    default: return recompute(second, recompute(first, x)).matmul(model.w);
  }
}

Training training_of(int mode, bool autocast = false) {
  Training training = function_training(
      [mode](FunctionModel& model, const at::Tensor& x) { return network(model, x, mode); });
  training.run_step = [autocast](LossModel& model, const Batch& batch) {
    at::manual_seed(static_cast<std::uint64_t>(batch.input.abs().sum().item<double>() * 1e4));
    if (autocast) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::increment_nesting();
    }
    const at::Tensor loss = model.loss(batch.input, batch.target);
    if (autocast) {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
    loss.backward();
    return loss.item<double>();
  };
  return training;
}

class LibraryRecomputeTest : public ::testing::TestWithParam<int> {};

// The input of the model requires no grad, so that nothing but the parameters does.
TEST_P(LibraryRecomputeTest, HasTheBitsOfAPlainCall) {
  const Trace plain = train_plain(training_of(0));
  expect_bit_equal(train_plain(training_of(GetParam())), plain);
  for (const Strategy strategy : {Strategy::kFullShard, Strategy::kShardGradients, Strategy::kReplicate}) {
    for (const int prefetch : {0, 1, 2}) {
      Training training = training_of(GetParam());
      training.options.strategy = strategy;
      training.options.prefetch = prefetch;
      expect_bit_equal(train_sharded(training, 1), plain);
    }
  }
}

TEST_P(LibraryRecomputeTest, HasTheBitsOfAPlainCallUnderAutocast) {
  const Trace plain = train_plain(training_of(0, true));
  expect_bit_equal(train_plain(training_of(GetParam(), true)), plain);
  expect_bit_equal(train_sharded(training_of(GetParam(), true), 1), plain);
}

INSTANTIATE_TEST_SUITE_P(Modes, LibraryRecomputeTest, ::testing::Values(1, 2, 3));

// Without random numbers, which thread ranks share.
TEST(RecomputeParityTest, EqualsPlainLibTorchOnSeveralRanksAndAccumulates) {
  const auto training_with = [](bool recomputes) {
    Training training = function_training([recomputes](FunctionModel& model, const at::Tensor& x) {
      const auto block = [&model](const at::Tensor& in) {
        return model.b(at::tanh(model.a(in)).narrow(1, 5, FunctionModel::kWidth)).matmul(model.w);
      };
      return recomputes ? recompute(block, x) : block(x);
    });
    training.run_step = [](LossModel& model, const Batch& batch) {
      double sum = 0;
      for (int i = 0; i < 2; ++i) {
        const at::Tensor loss = model.loss(batch.input * (i + 1), batch.target);
        loss.backward();
        sum += loss.item<double>();
      }
      return sum;
    };
    return training;
  };
  for (const int world_size : {1, 2, 3, 4})
    expect_bit_equal(train_sharded(training_with(true), world_size), train_sharded(training_with(false), world_size));
}

TEST(RecomputeTest, TakesAndGivesSeveralTensorsOfSeveralKinds) {
  at::set_num_threads(1);
  const auto run = [](bool recomputes) {
    const at::Tensor x = at::arange(6, at::kFloat).requires_grad_(true), y = at::ones({6}).requires_grad_(true);
    const at::Tensor index = at::arange(6, at::kLong);
    const auto function = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& i) {
      return std::tuple(a.mul(b).index_select(0, i.flip(0)), i + 1, a.detach() * 2);
    };
    const auto [product, next, constant] = recomputes ? recompute(function, x, y, index) : function(x, y, index);
    EXPECT_EQ(next.scalar_type(), at::kLong);
    const std::vector<at::Tensor> two = recomputes ? recompute(
                                                         [](const at::Tensor& a) {
                                                           return std::vector<at::Tensor>{a.sin(), a.cos()};
                                                         },
                                                         product)
                                                   : std::vector<at::Tensor>{product.sin(), product.cos()};
    (two[0] * two[1] + constant).sum().backward();
    return std::pair(x.grad().clone(), y.grad().clone());
  };
  const auto plain = run(false), recomputed = run(true);
  expect_equal(recomputed.first, plain.first, 0, 0, "x");
  expect_equal(recomputed.second, plain.second, 0, 0, "y");
}

TEST(RecomputeTest, KeepsNoIntermediateTensor) {
  CountingAllocator& allocator = CountingAllocator::install();
  at::set_num_threads(1);
  const at::Tensor x = at::ones({1 << 16}).requires_grad_(true);
  const auto held = [&](bool recomputes) {
    const std::size_t before = allocator.live_bytes();
    const auto chain = [](const at::Tensor& in) {
      at::Tensor y = in;
      for (int i = 0; i < 10; ++i) y = at::sin(y);
      return y;
    };
    const at::Tensor out = recomputes ? recompute(chain, x) : chain(x);
    return allocator.live_bytes() - before;
  };
  EXPECT_GE(held(false), 10 * x.nbytes());
  EXPECT_LT(held(true), x.nbytes() + 65536);  // the output, and what is kept of the generator
}

TEST(RecomputeTest, LeavesTheGeneratorWhereAPlainBackwardWould) {
  at::manual_seed(3);
  const at::Tensor x = at::ones({100}).requires_grad_(true);
  const at::Tensor y = recompute([](const at::Tensor& in) { return at::dropout(in, 0.5, true); }, x);
  const at::Tensor before = at::rand({4});
  at::manual_seed(3);
  at::dropout(at::ones({100}), 0.5, true);
  EXPECT_TRUE(at::equal(at::rand({4}), before));
  y.sum().backward();
  expect_equal(x.grad(), y.detach(), 0, 0, "the mask of backward");
  at::manual_seed(3);
  at::dropout(at::ones({100}), 0.5, true);
  at::rand({4});
  const at::Tensor expected = at::rand({4});
  at::manual_seed(3);
  const at::Tensor again = recompute([](const at::Tensor& in) { return at::dropout(in, 0.5, true); }, x);
  at::rand({4});
  again.sum().backward();
  expect_equal(at::rand({4}), expected, 0, 0, "the next draw");
}

TEST(RecomputeTest, IsAPlainCallWithoutGradients) {
  int calls = 0;
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::ones({3}).requires_grad_(true);
  const at::Tensor y = recompute(
      [&calls](const at::Tensor& in) {
        ++calls;
        return in * 2;
      },
      x);
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(y.requires_grad());
}

TEST(RecomputeTest, RefusesWhatItCannotDoByName) {
  const at::Tensor weight = at::ones({3}).requires_grad_(true), x = at::ones({3}).requires_grad_(true);
  const at::Tensor y = recompute([weight](const at::Tensor& in) { return in * weight; }, x);
  EXPECT_THAT(text_of<std::exception>([&] { torch::autograd::grad({y.sum()}, {x}); }),
              ::testing::HasSubstr("fsdp::recompute: torch::autograd::grad"));
  const at::Tensor changed = at::ones({3}).requires_grad_(true) * 1;
  const at::Tensor z = recompute([weight](const at::Tensor& in) { return in * weight; }, changed);
  changed.detach().add_(1);
  EXPECT_THAT(text_of<std::exception>([&] { z.sum().backward(); }), ::testing::HasSubstr("modified by an inplace"));
}

TEST(RecomputeTest, PassesOnWhatTheFunctionThrows) {
  const at::Tensor x = at::ones({3}).requires_grad_(true);
  int calls = 0;
  const at::Tensor y = recompute(
      [&calls](const at::Tensor& in) {
        if (++calls == 2) throw std::runtime_error("the second run");
        return in * 2;
      },
      x);
  at::manual_seed(9);
  const at::Tensor expected = at::rand({2});
  at::manual_seed(9);
  EXPECT_THAT(text_of<std::exception>([&] { y.sum().backward(); }), ::testing::HasSubstr("the second run"));
  EXPECT_TRUE(at::equal(at::rand({2}), expected));
}

}  // namespace
}  // namespace fsdp::testing
