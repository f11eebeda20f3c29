// fsdp::recompute with its inputs kept in host memory, on a device whose memory is counted.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>

#include <fsdp/recompute.h>

#include "tests/support/test_device.h"

namespace fsdp::testing {
namespace {

constexpr int kLayers = 4;
constexpr std::int64_t kBatch = 32, kWidth = 64;
constexpr std::size_t kActivationBytes = kBatch * kWidth * sizeof(float);

struct Layers {
  std::vector<at::Tensor> weights;
  at::Tensor input;
};

Layers make_layers() {
  at::manual_seed(7);
  Layers layers;
  for (int i = 0; i < kLayers; ++i)
    layers.weights.push_back((at::randn({kWidth, kWidth}) / 8).to(test_device()).requires_grad_(true));
  layers.input = at::randn({kBatch, kWidth}).to(test_device());
  return layers;
}

at::Tensor layer(const at::Tensor& weight, const at::Tensor& x) {
  return at::dropout(at::tanh(x.matmul(weight)), 0.3, /*train=*/true);
}

struct Outcome {
  std::vector<at::Tensor> gradients;  // on the CPU
  std::size_t held_bytes;             // of the device, from forward to backward
};

template <class Call>
Outcome run(const Call& call) {
  Layers layers = make_layers();
  const std::size_t before = test_device_bytes();
  at::Tensor x = layers.input;
  for (const at::Tensor& weight : layers.weights) x = call(weight, x);
  Outcome result{{}, test_device_bytes() - before};
  x.sum().backward();
  for (const at::Tensor& weight : layers.weights) result.gradients.push_back(weight.grad().cpu());
  return result;
}

Outcome run_recomputed(const RecomputeOptions& options) {
  return run([&](const at::Tensor& weight, const at::Tensor& x) {
    return recompute(
        options, [weight](const at::Tensor& in) { return layer(weight, in); }, x);
  });
}

TEST(ActivationOffloadTest, HasTheBitsOfAPlainCall) {
  const Outcome plain = run(layer), on_device = run_recomputed({}), on_host = run_recomputed({.inputs_on_host = true});
  for (int i = 0; i < kLayers; ++i) {
    const auto index = static_cast<std::size_t>(i);
    EXPECT_TRUE(plain.gradients[index].equal(on_device.gradients[index])) << i;
    EXPECT_TRUE(plain.gradients[index].equal(on_host.gradients[index])) << i;
    EXPECT_GT(plain.gradients[index].abs().max().item<float>(), 0);
  }
}

// Without it the device holds each layer's output, the next one's input; with it the last one's alone.
TEST(ActivationOffloadTest, TheDeviceHoldsNoInputs) {
  EXPECT_EQ(run_recomputed({}).held_bytes, kLayers * kActivationBytes);
  EXPECT_EQ(run_recomputed({.inputs_on_host = true}).held_bytes, kActivationBytes);
  EXPECT_EQ(test_device_bytes(), 0U);
}

// A copy is kept, so the input may change: to save memory, or as the next batch in one buffer.
TEST(ActivationOffloadTest, InputsMayChangeAfterTheCall) {
  const auto gradient_of = [](const RecomputeOptions& options, bool changes) {
    Layers layers = make_layers();
    const at::Tensor& weight = layers.weights.front();
    const at::Tensor y = recompute(
        options, [weight](const at::Tensor& in) { return layer(weight, in); }, layers.input);
    if (changes) layers.input.zero_();
    y.sum().backward();
    return weight.grad().cpu();
  };
  EXPECT_TRUE(gradient_of({.inputs_on_host = true}, true).equal(gradient_of({}, false)));
  EXPECT_THROW(gradient_of({}, true), c10::Error);
}

// An input that is the CPU's, an undefined one, one that requires grad and one of integers, in one call.
TEST(ActivationOffloadTest, EachInputComesBackToWhereItWas) {
  at::manual_seed(3);
  const at::Tensor on_cpu = at::randn({4}).requires_grad_(true), undefined;
  const at::Tensor on_device = at::randn({4}).to(test_device()).requires_grad_(true);
  const at::Tensor integers = at::arange(4).to(test_device());
  int runs = 0;
  const at::Tensor y = recompute(
      {.inputs_on_host = true},
      [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, const at::Tensor& d) {
        ++runs;
        EXPECT_TRUE(a.is_cpu());
        EXPECT_FALSE(b.defined());
        EXPECT_EQ(c.device(), test_device());
        EXPECT_EQ(d.device(), test_device());
        return (a.to(test_device()) * c * d).sum();
      },
      on_cpu, undefined, on_device, integers);
  y.backward();
  EXPECT_EQ(runs, 2);
  EXPECT_TRUE(on_cpu.grad().equal((on_device.detach() * integers).cpu()));
  EXPECT_TRUE(on_device.grad().cpu().equal(on_cpu.detach() * integers.cpu()));
}

}  // namespace
}  // namespace fsdp::testing
