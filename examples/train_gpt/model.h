// GPT-2's shape over bytes, in plain torch::nn modules. Nothing here knows that the model may be sharded.
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "examples/train_gpt/config.h"

namespace gpt {

class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const Config& config);
  torch::Tensor forward(const torch::Tensor& x);  // (B, T, width) -> (B, T, width)

 private:
  std::int64_t heads_;
  torch::nn::Linear qkv_, projection_;
};
TORCH_MODULE(Attention);

// Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)).
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const Config& config);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::nn::LayerNorm attention_norm_, mlp_norm_;
  Attention attention_;
  torch::nn::Linear expand_, contract_;
};
TORCH_MODULE(Block);

class GPTImpl : public torch::nn::Module {
 public:
  // Initialised as GPT-2: normal(0, 0.02), the projections into the residual stream scaled by 1/sqrt(2 layers), biases zero.
  explicit GPTImpl(const Config& config);
  // (B, T) int64 bytes -> (B, T, 256) logits. REQUIRES T <= config().context.
  torch::Tensor forward(const torch::Tensor& bytes);
  const Config& config() const { return config_; }

 private:
  void initialise();

  Config config_;
  torch::nn::Embedding token_embedding_, position_embedding_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm final_norm_;
};
TORCH_MODULE(GPT);

enum class Reduction { kMean, kPerWindow };

// Cross-entropy in nats of each byte of `windows` (B, T + 1 bytes) given those before it: the mean, or one mean per window.
torch::Tensor next_byte_loss(GPT& model, const torch::Tensor& windows, Reduction reduction = Reduction::kMean);

}  // namespace gpt
