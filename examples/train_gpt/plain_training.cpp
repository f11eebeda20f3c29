#include "examples/train_gpt/plain_training.h"

#include <chrono>
#include <memory>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "examples/train_gpt/inference.h"
#include "examples/train_gpt/training_log.h"

namespace gpt {

namespace {

torch::optim::AdamW make_optimizer(GPT& model, const Options& options) {
  std::vector<torch::Tensor> decayed, kept;
  for (const auto& parameter : model->parameters()) (parameter.dim() >= 2 ? decayed : kept).push_back(parameter);
  const auto group = [&](std::vector<torch::Tensor> parameters, double decay) {
    auto settings = torch::optim::AdamWOptions(options.lr).betas({kBetas[0], kBetas[1]}).weight_decay(decay);
    return torch::optim::OptimizerParamGroup(std::move(parameters),
                                             std::make_unique<torch::optim::AdamWOptions>(settings));
  };
  return torch::optim::AdamW({group(std::move(decayed), kWeightDecay), group(std::move(kept), 0)});
}

void set_lr(torch::optim::AdamW& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

}  // namespace

Summary train_plain(const Options& options, const Corpus& corpus, AllocationCounter& allocations, Report& report) {
  GPT model(options.model);
  auto optimizer = make_optimizer(model, options);
  Summary summary{.last_step = options.last_step(), .bigram_entropy = corpus.bigram_entropy()};
  for (const auto& parameter : model->parameters()) summary.parameters += parameter.numel();
  TrainingLog log(options, report, summary, [](double value) { return value; });

  for (std::int64_t step = 0; step < options.last_step(); ++step) {
    const auto begin = std::chrono::steady_clock::now();
    set_lr(optimizer, learning_rate(options, step));
    // Before forward: gradients of the last step beside the activations of this one would double their memory.
    optimizer.zero_grad();
    const auto batch = corpus.batch({.seed = options.seed, .step = step, .global_rows = options.batch});
    const auto loss = next_byte_loss(model, to_tensor(batch));
    loss.backward();
    const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), kMaxGradNorm);
    optimizer.step();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    log.add(step, {.loss = loss.item<double>(),
                   .grad_norm = norm,
                   .seconds = time.count(),
                   .memory_bytes = allocations.peak_bytes()});
  }

  summary.state_bytes = summary.plain_state_bytes = 4 * sizeof(float) * static_cast<std::size_t>(summary.parameters);
  summary.peak_bytes = summary.plain_bytes = allocations.peak_bytes();
  report.memory({{.kind = "total", .measured = summary.peak_bytes, .plain = summary.plain_bytes}});
  summary.held_out_after = held_out_loss(model, corpus);
  summary.sample = sample(model, {.bytes = options.sample, .seed = options.seed});
  return summary;
}

}  // namespace gpt
