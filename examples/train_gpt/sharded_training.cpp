#include "examples/train_gpt/sharded_training.h"

#include <algorithm>
#include <chrono>
#include <map>

#include <fmt/format.h>
#include <fsdp/fsdp.h>

#include "examples/train_gpt/inference.h"
#include "examples/train_gpt/training_log.h"

namespace gpt {

namespace {

fsdp::AdamW adamw(const Options& options) {
  const auto is_bias_or_norm = [](const std::string&, std::int64_t ndim) { return ndim < 2; };
  return {.lr = options.lr,
          .betas = kBetas,
          .weight_decay = kWeightDecay,
          .groups = {{.matches = is_bias_or_norm, .weight_decay = 0.0}}};
}

void report_memory(Report& report, const fsdp::Engine& engine, const Summary& summary) {
  const auto plan = engine.plan();
  const auto& predicted = plan.predicted;
  const auto measured = engine.memory();
  const auto row = [&](const char* kind, std::size_t fsdp::MemoryReport::*bytes) {
    return MemoryRow{kind, predicted.*bytes, measured.*bytes, std::nullopt};
  };
  const auto activations = summary.peak_bytes - summary.state_bytes;
  report.memory({row("parameters", &fsdp::MemoryReport::parameter_shard_bytes),
                 row("fp32 masters", &fsdp::MemoryReport::master_bytes),
                 row("gradients", &fsdp::MemoryReport::gradient_shard_bytes),
                 row("optimizer state", &fsdp::MemoryReport::optimizer_bytes),
                 row("arena for gathered units", &fsdp::MemoryReport::arena_bytes),
                 row("communication", &fsdp::MemoryReport::communication_bytes),
                 row("overflow beside the arena", &fsdp::MemoryReport::peak_overflow_bytes),
                 {"all of these", predicted.total_bytes(), summary.state_bytes, summary.plain_state_bytes},
                 {"activations", std::nullopt, activations, activations},
                 {"total", std::nullopt, summary.peak_bytes, summary.plain_bytes}});
}

fsdp::ShardOptions shard_options(const Options& options) {
  const std::map<std::string, fsdp::Strategy> strategies{{"replicate", fsdp::Strategy::kReplicate},
                                                         {"shard_optimizer", fsdp::Strategy::kShardOptimizer},
                                                         {"shard_gradients", fsdp::Strategy::kShardGradients},
                                                         {"full_shard", fsdp::Strategy::kFullShard}};
  return {.units = fsdp::units<Block>(),
          .strategy = strategies.at(options.strategy),
          .shard_group = options.shard_group,
          .precision = {.param = options.precision == "bf16" ? torch::kBFloat16 : torch::kFloat},
          .prefetch = options.prefetch};
}

class ShardedTraining {
 public:
  ShardedTraining(const fsdp::Context& context, const Options& options, const Corpus& corpus,
                  AllocationCounter& allocations)
      : context_(context),
        options_(options),
        corpus_(corpus),
        allocations_(allocations),
        model_(options.model),
        engine_(fsdp::shard(context, model_, shard_options(options))) {}

  Summary run(Report& report) {
    Summary summary{.world_size = context_.world_size(), .bigram_entropy = corpus_.bigram_entropy()};
    for (const auto& parameter : model_->parameters()) summary.parameters += parameter.numel();
    if (options_.load.empty()) {
      train(report, summary);
    } else {
      engine_.load_consolidated(options_.load);
    }
    summary.held_out_after = held_out();
    if (!options_.consolidate.empty()) engine_.consolidate(options_.consolidate);
    summary.sample = sample(model_, {.bytes = options_.sample, .seed = options_.seed});
    return summary;
  }

 private:
  void train(Report& report, Summary& summary) {
    auto optimizer = engine_.optimizer(adamw(options_));
    report.heading("plan");
    report.line(engine_.plan().to_string());
    if (options_.resume) resume(report, summary);
    summary.last_step = std::max(summary.first_step, options_.last_step());

    report.heading("training");
    allocations_.reset_peak();
    const auto baseline = allocations_.live_bytes();
    TrainingLog log(options_, report, summary, [this](double value) { return context_.mean(value); });
    for (auto step = summary.first_step; step < options_.last_step(); ++step) {
      const auto begin = std::chrono::steady_clock::now();
      optimizer.set_lr(learning_rate(options_, step));
      const auto loss = next_byte_loss(model_, to_tensor(batch(step)));
      loss.backward();
      const auto result = optimizer.step({.max_grad_norm = kMaxGradNorm});
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;

      log.add(step, {.loss = loss.item<double>(),
                     .grad_norm = result.grad_norm,
                     .seconds = time.count(),
                     .memory_bytes = state_bytes() + allocations_.peak_bytes() - baseline});
      if (is_save_due(step + 1)) engine_.save(options_.out);
    }
    count_memory(summary, allocations_.peak_bytes() - baseline);
    report_memory(report, engine_, summary);
  }

  std::size_t state_bytes() const {
    const auto memory = engine_.memory();
    return memory.total_bytes() + memory.peak_overflow_bytes;
  }

  void count_memory(Summary& summary, std::size_t activations) const {
    summary.state_bytes = state_bytes();
    summary.peak_bytes = summary.state_bytes + activations;
    // Without sharding gradients come alive while activations die, so at least the larger of the two is beside the rest.
    const auto gradients = static_cast<std::size_t>(summary.parameters) * sizeof(float);
    summary.plain_state_bytes = engine_.plan().unsharded_bytes;
    summary.plain_bytes = summary.plain_state_bytes - gradients + std::max(gradients, activations);
  }

  void resume(Report& report, Summary& summary) {
    const auto step = engine_.resume(options_.out);
    if (!step) {
      throw UsageError(
          fmt::format("--resume found no complete checkpoint in {}: start without --resume", options_.out.string()));
    }
    summary.first_step = *step;
    summary.held_out_before = held_out();
    report.line(fmt::format("resumed {} at step {}: held-out loss {:.6f}", options_.out.string(), *step,
                            *summary.held_out_before));
  }

  Windows batch(std::int64_t step) const {
    return corpus_.batch({.seed = options_.seed,
                          .step = step,
                          .global_rows = options_.batch,
                          .rank = context_.rank(),
                          .world_size = context_.world_size()});
  }

  double held_out() {
    return held_out_loss(model_, corpus_,
                         {.rank = context_.rank(), .world_size = context_.world_size(), .mean = [this](double value) {
                            return context_.mean(value);
                          }});
  }

  bool is_save_due(std::int64_t done) const {
    if (options_.out.empty()) return false;
    return done == options_.last_step() || (options_.save_every > 0 && done % options_.save_every == 0);
  }

  const fsdp::Context& context_;
  const Options& options_;
  const Corpus& corpus_;
  AllocationCounter& allocations_;
  GPT model_;
  fsdp::Engine engine_;
};

}  // namespace

Summary train_sharded(const fsdp::Context& context, const Options& options, const Corpus& corpus,
                      AllocationCounter& allocations, Report& report) {
  return ShardedTraining(context, options, corpus, allocations).run(report);
}

}  // namespace gpt
