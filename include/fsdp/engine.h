// The engine: shards a module's parameters, pages units in as they are touched, reduces gradients as backward makes
// them.
//
// Threads and streams. One engine belongs to one rank. Forward and backward may run on any thread; step, save, resume
// and the other collectives are called by one thread at a time, in the same order on every rank. Gathers and
// reductions run on the engine's own thread.
//
// Writes. An operator that writes a parameter (torch::nn::init, copy_, Embedding with max_norm) is collective: every
// rank runs it. Of each element the owner's new value counts, or, where it changed nothing, that of the lowest rank
// that did.
//
// What is refused, by name and on the spot: set_ and resize_ of a parameter, torch::load and Module::to after shard()
// (found at the next step's start), a replaced gradient hook, sparse gradients, raw reads of a parameter that is not
// resident, and reads of a sharded gradient; parameters that are registered after shard() (found in steps 0, 1, 2, 4,
// 8, ... and when saving).
#pragma once

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <fsdp/context.h>
#include <fsdp/memory_stats.h>
#include <fsdp/optimizer.h>
#include <fsdp/options.h>
#include <fsdp/outputs.h>
#include <fsdp/shard_view.h>

namespace fsdp {

class EngineState;
struct TorchOptimizer;

// For a frozen base with trained adapters: parameters that do not require grad are neither written nor asked for.
struct SaveOptions {
  bool trainable_only = false;
};
struct ResumeOptions {
  bool trainable_only = false;  // as it was saved
  // The checkpoint's learning rate, as Optimizer::set_lr had left it, and its betas, eps, weight decay and momentum
  // replace those that Engine::optimizer was given, if it is the same kind of optimizer (of a TorchOptimizer: the
  // learning rate). What parameter groups override stays theirs. false: all stay as they were given.
  bool optimizer_settings = true;
};
struct LoadOptions {
  bool trainable_only = false;  // the file holds trainable parameters only; frozen ones stay as they are
};

// Gradients of backward passes stay local while one lives (and its engine): they accumulate in a whole fp32 buffer per
// rank, allocated by the engine's first scope and kept. The next backward outside of a scope reduces them along with
// its own; if none comes, Optimizer::step does. A unit is reduced so once a step: what comes for it within a scope
// after that is reduced as if there were none.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(EngineState& engine);  // collective where it is the engine's first
  NoSync(NoSync&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
  NoSync& operator=(NoSync&&) = delete;
  ~NoSync();

 private:
  EngineState* engine_;
};

// Nothing is freed while one lives: every unit that is touched stays gathered, beyond the arena in memory taken for it.
// For generation, where forwards follow each other and their number may differ between ranks.
class [[nodiscard]] KeepGathered {
 public:
  explicit KeepGathered(EngineState& engine);
  KeepGathered(KeepGathered&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
  KeepGathered& operator=(KeepGathered&&) = delete;
  ~KeepGathered();

 private:
  EngineState* engine_;
};

struct SummonOptions {
  bool writeback = false;  // values written through raw pointers are kept, as those of an operator: NOTE Writes above
  bool gradients =
      false;  // .grad of each used parameter is its whole mean gradient; collective, finishes what is pending
};

// While one lives, whole parameters lie in memory on every rank: data_ptr() and accessors work, and need no operator.
// Costs the whole model on each rank. Opening and closing are collective; no step, save or resume meanwhile.
class [[nodiscard]] Summoned {
 public:
  Summoned(EngineState& engine, const SummonOptions& options);
  Summoned(Summoned&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
  Summoned& operator=(Summoned&&) = delete;
  // Call close() where values were summoned for writing, or other ranks may fail within the scope (Engine::attempt): it can
  // throw, and a destructor reports nothing.
  ~Summoned();
  void close();

 private:
  EngineState* engine_;
  SummonOptions options_;
};

// While one lives the parameters are their averages (Engine::keep_ema). Opening and closing are collective; no step,
// save or resume meanwhile.
class [[nodiscard]] AveragedWeights {
 public:
  explicit AveragedWeights(EngineState& engine);
  AveragedWeights(AveragedWeights&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
  AveragedWeights& operator=(AveragedWeights&&) = delete;
  // As Summoned: close() throws StepFailed where another rank has failed within the scope; a destructor reports nothing.
  ~AveragedWeights();
  void close();

 private:
  EngineState* engine_;
};

class Engine {
 public:
  explicit Engine(std::unique_ptr<EngineState> state);
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  // After this the module's parameters can no longer be read: an operator on one throws.
  ~Engine();

  // Collective, once per engine; allocates the optimizer's state. Throws InvalidArgument for values out of range, and on
  // every rank where ranks give other values.
  Optimizer optimizer(AdamW options);
  Optimizer optimizer(Adam options);
  Optimizer optimizer(SGD options);
  Optimizer optimizer(Muon options);
  Optimizer optimizer(TorchOptimizer options);

  // Collective. Writes dir/step-%06d with parameters, optimizer state and this rank's random state; see
  // <fsdp/checkpoint.h>.
  void save(const std::filesystem::path& dir, const SaveOptions& options = {});
  // Collective. Loads the newest committed step of dir, saved at any world size; returns its step, or nullopt if there
  // is none. Call after optimizer(). Drops accumulated gradients. A CheckpointError comes on every
  // rank: a foreign checkpoint has changed no value; one found damaged while it is read leaves the model partly loaded.
  std::optional<std::int64_t> resume(const std::filesystem::path& dir, const ResumeOptions& options = {});
  // Collective; rank 0 writes one safetensors file, one tensor in memory at a time.
  void consolidate(const std::filesystem::path& file, const SaveOptions& options = {});
  // Collective. Parameters from one safetensors file, read by each rank for its own ranges.
  void load_consolidated(const std::filesystem::path& file, const LoadOptions& options = {});

  // This rank's parts of parameters, then of optimizer state. Borrowed; valid as long as the engine. Tied parameters
  // appear once.
  std::vector<ShardView> shard_views() const;
  // Collective: finishes pending reductions, then gives this rank's parts of the mean gradients (fp32 for fp32, bf16
  // and fp16 parameters) of those parameters that some rank used since the last step. Valid until the next step or
  // zero_grad.
  std::vector<ShardView> gradient_views();

  // Keeps an average of the trainable parameters from now on, sharded as they are, in fp32 (fp64 for fp64): updated in
  // the optimizer's pass, saved and resumed as "ema.<name>". Once, after optimizer() and before resume().
  void keep_ema(const Ema& options);
  // Collective.
  AveragedWeights use_ema();

  // function(inputs...) with floating-point tensors among the inputs cast to ShardOptions::precision.param, and
  // floating-point results to precision.output, if they are set; all else passes through. Casts are part of the graph.
  // The function returns a tensor, a vector or a tuple of tensors.
  //
  //   y = engine.forward([&](const at::Tensor& x) { return model->forward(x); }, input);
  template <class Function, class... Inputs>
  auto forward(Function&& function, const Inputs&... inputs) {
    using Result = std::decay_t<std::invoke_result_t<Function, const Inputs&...>>;
    using Outputs = detail::Outputs<Result>;
    return Outputs::unpack(cast_outputs(Outputs::pack(function(cast_input(inputs)...))));
  }

  // mean_loss * samples, for ranks and micro-batches of different size: the step's gradient is then
  //   sum(samples * gradient of mean_loss) / sum(samples)
  // over all ranks and micro-batches since the last step, instead of the mean over ranks and the sum over
  // micro-batches. A rank that has run out of data calls step() without a backward. Within a step every loss is
  // weighed, or none.
  at::Tensor weigh(const at::Tensor& mean_loss, double samples);

  // Runs forward, backward and step where ranks may fail by themselves: a bad sample, an allocation. If `body` throws
  // on any rank, the gradients of this step are dropped on all of them, and StepFailed, which names the first rank that
  // failed and its error, is thrown here, and on the others from the step, gradient_views or zero_grad that they come
  // to. Weights and optimizer state are those of before; every rank goes on with its next batch. A CommunicationError
  // is none of these: it ends the job. After what can fail, `body` may call no other collective than those three.
  void attempt(const std::function<void()>& body);

  NoSync no_sync();
  KeepGathered keep_gathered();
  // Collective.
  Summoned summon(const SummonOptions& options = {});

  MemoryReport memory() const;
  Plan plan() const;
  std::int64_t step() const;  // optimizer steps taken, resumed ones included

 private:
  template <class Input>
  const Input& cast_input(const Input& input) const {
    return input;
  }
  at::Tensor cast_input(const at::Tensor& input) const;
  std::vector<at::Tensor> cast_outputs(std::vector<at::Tensor> outputs);

  std::unique_ptr<EngineState> state_;
};

// Collective. Shards the module's parameters in place; every rank passes the same architecture. Values of parameters
// and buffers are those of rank 0 (the engine broadcasts them), so ranks need not seed alike; a module made by
// deferred_init takes its values from its own seed, each rank its shares only. Names and identities of the parameter
// tensors stay. Throws InvalidArgument naming the parameter where its storage is shared with something else, overlaps
// another's, is sparse or on another device, or has a gradient; and where `units` matches nothing. The engine keeps the
// module alive.
Engine shard(const Context& context, std::shared_ptr<torch::nn::Module> module, const ShardOptions& options = {});

// The same for a module holder (TORCH_MODULE).
template <class Holder>
  requires requires(Holder holder) {
    typename Holder::ContainedType;
    holder.ptr();
  }
Engine shard(const Context& context, Holder holder, const ShardOptions& options = {}) {
  return shard(context, std::shared_ptr<torch::nn::Module>(holder.ptr()), options);
}

}  // namespace fsdp
