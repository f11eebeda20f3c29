#include "benchmarks/gpt_worker.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fsdp/fsdp.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "examples/train_gpt/allocation_counter.h"
#include "examples/train_gpt/inference.h"

namespace fsdp {

namespace {

constexpr double kLearningRate = 1e-3, kMaxGradNorm = 1.0;

// 128 KiB of 32 letters, of which each is likelier the earlier it comes in the alphabet.
gpt::Corpus make_corpus(const gpt::Config& config) {
  std::mt19937 random(1);
  std::string text(128 << 10, ' ');
  for (auto& letter : text) letter = static_cast<char>('@' + std::min(random() % 32, random() % 32));
  return gpt::Corpus(text, config.context);
}

// What both variants share: batches, time and the bytes that LibTorch's allocator sees.
class Stage {
 public:
  explicit Stage(const Workload& workload)
      : allocations_(gpt::AllocationCounter::install()), workload_(workload), corpus_(make_corpus(workload.model)) {
    at::set_num_threads(workload.threads);
    at::manual_seed(1);
  }

  torch::Tensor next_batch(int rank, int world_size) {
    return gpt::to_tensor(corpus_.batch(
        {.seed = 1, .step = step_++, .global_rows = workload_.rows, .rank = rank, .world_size = world_size}));
  }

  // `step` gives the loss of one step. The peak is counted from the bytes alive before the first.
  template <class Step>
  Measurement run(int steps, const Step& step) {
    const auto alive = allocations_.live_bytes();
    allocations_.reset_peak();
    Measurement result;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) result.loss += step() / steps;
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    result.memory.activations = allocations_.peak_bytes() - alive;
    return result;
  }

 private:
  gpt::AllocationCounter& allocations_;
  Workload workload_;
  gpt::Corpus corpus_;
  std::int64_t step_ = 0;
};

class PlainWorker {
 public:
  explicit PlainWorker(const Workload& workload)
      : stage_(workload),
        model_(workload.model),
        optimizer_(model_->parameters(), torch::optim::AdamWOptions(kLearningRate)) {}

  Measurement run(int steps) {
    auto result = stage_.run(steps, [this] {
      optimizer_.zero_grad();
      const auto loss = gpt::next_byte_loss(model_, stage_.next_batch(0, 1));
      loss.backward();
      torch::nn::utils::clip_grad_norm_(model_->parameters(), kMaxGradNorm);
      optimizer_.step();
      return loss.item<double>();
    });
    const auto bytes = static_cast<std::size_t>(model_numel(model_->config())) * sizeof(float);
    result.memory.parameters = bytes;
    result.memory.optimizer = 2 * bytes;
    // Gradients come alive while activations die, so that only the peak of both together exists; it is filed under
    // activations. Those of the block before were alive at its start, and zero_grad let go of them.
    result.memory.activations += bytes;
    return result;
  }

 private:
  Stage stage_;
  gpt::GPT model_;
  torch::optim::AdamW optimizer_;
};

class ShardedWorker {
 public:
  explicit ShardedWorker(const Workload& workload)
      : context_(fsdp::init()),
        stage_(workload),
        model_(workload.model),
        engine_(fsdp::shard(context_, model_, {.units = fsdp::units<gpt::Block>()})),
        optimizer_(engine_.optimizer(AdamW{.lr = kLearningRate})) {}

  Measurement run(int steps) {
    auto result = stage_.run(steps, [this] {
      const auto loss = gpt::next_byte_loss(model_, stage_.next_batch(context_.rank(), context_.world_size()));
      loss.backward();
      optimizer_.step({.max_grad_norm = kMaxGradNorm});
      return loss.item<double>();
    });
    result.loss = context_.mean(result.loss);
    const auto report = engine_.memory();
    result.memory.parameters = report.parameter_shard_bytes;
    result.memory.gradients = report.gradient_shard_bytes;
    result.memory.optimizer = report.optimizer_bytes;
    result.memory.arena = report.arena_bytes;
    result.memory.communication = report.communication_bytes;
    result.memory.overflow = report.peak_overflow_bytes;
    return result;
  }

 private:
  Context context_;
  Stage stage_;
  gpt::GPT model_;
  Engine engine_;
  Optimizer optimizer_;
};

template <class Worker>
Block prepare(const Workload& workload) {
  return [worker = std::make_shared<Worker>(workload)](int steps) { return worker->run(steps); };
}

std::int64_t block_numel(const gpt::Config& config) {
  const auto width = config.width;
  return 12 * width * width + 13 * width;  // matrices 3 + 1 + 4 + 4, biases 3 + 1 + 4 + 1, two norms of two vectors
}

std::int64_t outside_numel(const gpt::Config& config) { return (gpt::kVocabulary + config.context + 2) * config.width; }

}  // namespace

Block prepare_plain(const Workload& workload) { return prepare<PlainWorker>(workload); }
Block prepare_sharded(const Workload& workload) { return prepare<ShardedWorker>(workload); }

std::int64_t model_numel(const gpt::Config& config) {
  return config.layers * block_numel(config) + outside_numel(config);
}
std::int64_t largest_unit_numel(const gpt::Config& config) {
  return std::max(block_numel(config), outside_numel(config));
}

}  // namespace fsdp
