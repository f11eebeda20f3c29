// Small models that between them use what real ones do. Plain torch::nn modules; nothing of libfsdp.
#pragma once

#include <memory>

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

namespace fsdp::testing {

// A model whose batch is along dimension 0 and whose loss is the mean over it.
class LossModel : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  virtual at::Tensor loss(const at::Tensor& input, const at::Tensor& target) = 0;
};

struct Batch {
  at::Tensor input, target;
};

// Pre-norm attention and MLP.
struct BlockImpl final : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads);
  at::Tensor forward(at::Tensor x);
  std::int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// Embedding, attention blocks, LSTM, convolution, norms and a head tied to the embedding, over byte sequences [N, T].
class MixedModel final : public LossModel {
 public:
  static constexpr std::int64_t kVocabulary = 31, kWidth = 24, kTime = 9;
  MixedModel();
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override;
  static Batch batch(std::int64_t size, std::uint64_t seed);

 private:
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LSTM lstm_{nullptr};
  torch::nn::Conv1d convolution_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
};

// `layers` equal Linear(width, width) units with tanh between, over [N, width].
class StackModel final : public LossModel {
 public:
  StackModel(std::int64_t layers, std::int64_t width);
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override;
  at::Tensor forward(at::Tensor x);
  Batch batch(std::int64_t size, std::uint64_t seed) const;
  torch::nn::ModuleList layers{nullptr};

 private:
  std::int64_t width_;
};

}  // namespace fsdp::testing
