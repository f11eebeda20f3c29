#include "examples/train_gpt/model.h"

#include <cmath>

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/init.h>

namespace gpt {

namespace F = torch::nn::functional;

namespace {

constexpr double kInitialDeviation = 0.02;

torch::nn::LayerNorm layer_norm(std::int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

}  // namespace

AttentionImpl::AttentionImpl(const Config& config)
    : heads_(config.heads),
      qkv_(register_module("qkv", torch::nn::Linear(config.width, 3 * config.width))),
      projection_(register_module("projection", torch::nn::Linear(config.width, config.width))) {}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x) {
  const auto batch = x.size(0), length = x.size(1), width = x.size(2);
  const auto qkv =
      qkv_(x).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});  // (3, B, heads, T, head width)
  const auto mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true);
  return projection_(mixed.transpose(1, 2).reshape({batch, length, width}));
}

BlockImpl::BlockImpl(const Config& config)
    : attention_norm_(register_module("attention_norm", layer_norm(config.width))),
      mlp_norm_(register_module("mlp_norm", layer_norm(config.width))),
      attention_(register_module("attention", Attention(config))),
      expand_(register_module("expand", torch::nn::Linear(config.width, 4 * config.width))),
      contract_(register_module("contract", torch::nn::Linear(4 * config.width, config.width))) {}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  const auto attended = x + attention_(attention_norm_(x));
  return attended + contract_(at::gelu(expand_(mlp_norm_(attended)), "tanh"));
}

GPTImpl::GPTImpl(const Config& config)
    : config_(config),
      token_embedding_(register_module("token_embedding", torch::nn::Embedding(kVocabulary, config.width))),
      position_embedding_(register_module("position_embedding", torch::nn::Embedding(config.context, config.width))),
      blocks_(register_module("blocks", torch::nn::ModuleList())),
      final_norm_(register_module("final_norm", layer_norm(config.width))) {
  for (std::int64_t layer = 0; layer < config.layers; ++layer) blocks_->push_back(Block(config));
  initialise();
}

void GPTImpl::initialise() {
  const double residual_deviation = kInitialDeviation / std::sqrt(2.0 * static_cast<double>(config_.layers));
  for (auto& [name, parameter] : named_parameters().pairs()) {
    if (name.ends_with("bias")) {
      torch::nn::init::zeros_(parameter);
    } else if (name.ends_with("projection.weight") || name.ends_with("contract.weight")) {
      torch::nn::init::normal_(parameter, 0.0, residual_deviation);
    } else if (parameter.dim() >= 2) {
      torch::nn::init::normal_(parameter, 0.0, kInitialDeviation);
    }
  }
}

torch::Tensor GPTImpl::forward(const torch::Tensor& bytes) {
  const auto positions = torch::arange(bytes.size(1), bytes.options());
  auto x = token_embedding_(bytes) + position_embedding_(positions);
  for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
  // The head is the embedding read the other way: one weight, two uses.
  return F::linear(final_norm_(x), token_embedding_->weight);
}

torch::Tensor next_byte_loss(GPT& model, const torch::Tensor& windows, Reduction reduction) {
  const auto length = windows.size(1) - 1;
  const auto logits = model->forward(windows.narrow(1, 0, length).to(torch::kLong)).to(torch::kFloat);
  const auto targets = windows.narrow(1, 1, length).to(torch::kLong);
  if (reduction == Reduction::kMean) return F::cross_entropy(logits.flatten(0, 1), targets.flatten());
  const auto options = F::CrossEntropyFuncOptions().reduction(torch::kNone);
  return F::cross_entropy(logits.transpose(1, 2), targets, options).mean(1);
}

}  // namespace gpt
