#include "tests/support/test_models.h"

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>

namespace fsdp::testing {
namespace {

at::Generator seeded(std::uint64_t seed) { return at::detail::createCPUGenerator(seed); }

}  // namespace

BlockImpl::BlockImpl(std::int64_t width, std::int64_t the_heads) : heads(the_heads) {
  norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
  projection = register_module("projection", torch::nn::Linear(width, width));
  up = register_module("up", torch::nn::Linear(width, 2 * width));
  down = register_module("down", torch::nn::Linear(2 * width, width));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  const auto n = x.size(0), time = x.size(1), width = x.size(2);
  const auto parts = qkv(norm1(x)).view({n, time, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
  const at::Tensor attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0,
                                                               /*is_causal=*/true);
  x = x + projection(attended.transpose(1, 2).reshape({n, time, width}));
  return x + down(at::gelu(up(norm2(x))));
}

MixedModel::MixedModel() : LossModel("MixedModel") {
  embedding_ = register_module("embedding", torch::nn::Embedding(kVocabulary, kWidth));
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (int i = 0; i < 3; ++i) blocks_->push_back(Block(kWidth, 3));
  lstm_ = register_module("lstm",
                          torch::nn::LSTM(torch::nn::LSTMOptions(kWidth, kWidth).num_layers(2).batch_first(true)));
  convolution_ = register_module("convolution",
                                 torch::nn::Conv1d(torch::nn::Conv1dOptions(kWidth, kWidth, 3).padding(1)));
  norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
}

at::Tensor MixedModel::loss(const at::Tensor& input, const at::Tensor& target) {
  at::Tensor x = embedding_(input);
  for (std::size_t i = 0; i < blocks_->size(); ++i) x = blocks_[i]->as<Block>()->forward(x);
  x = x + std::get<0>(lstm_(x));
  x = norm_(x + convolution_(x.transpose(1, 2)).transpose(1, 2));
  const at::Tensor logits = at::matmul(x, embedding_->weight.t());
  return at::cross_entropy_loss(logits.reshape({-1, kVocabulary}), target.reshape({-1}));
}

Batch MixedModel::batch(std::int64_t size, std::uint64_t seed) {
  auto generator = seeded(seed);
  return {at::randint(0, kVocabulary, {size, kTime}, generator, at::kLong),
          at::randint(0, kVocabulary, {size, kTime}, generator, at::kLong)};
}

StackModel::StackModel(std::int64_t count, std::int64_t width) : LossModel("StackModel"), width_(width) {
  layers = register_module("layers", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < count; ++i) layers->push_back(torch::nn::Linear(width, width));
}

at::Tensor StackModel::forward(at::Tensor x) {
  for (std::size_t i = 0; i < layers->size(); ++i) x = at::tanh(layers[i]->as<torch::nn::Linear>()->forward(x));
  return x;
}

at::Tensor StackModel::loss(const at::Tensor& input, const at::Tensor& target) {
  return at::mse_loss(forward(input), target);
}

Batch StackModel::batch(std::int64_t size, std::uint64_t seed) const {
  auto generator = seeded(seed);
  return {at::randn({size, width_}, generator), at::randn({size, width_}, generator)};
}

}  // namespace fsdp::testing
