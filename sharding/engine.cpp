#include <fsdp/engine.h>

#include <functional>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/deferred_storage.h"
#include "sharding/engine_state.h"

namespace fsdp {
namespace {

// Ranks with different models or options would agree on nothing that follows.
void check_same_model(const Context& context, const torch::nn::Module& module, const std::vector<CutUnit>& units,
                      const std::vector<UnitPolicy>& policies, const ShardOptions& options) {
  struct Summary {
    std::uint64_t hash = 0;
    std::int64_t parameters = 0, numel = 0;
    bool operator==(const Summary&) const = default;
  } own;
  const auto mix = [&own](std::uint64_t value) { own.hash = (own.hash ^ value) * 1099511628211ULL; };
  mix(static_cast<std::uint64_t>(options.prefetch));
  for (const UnitPolicy& policy : policies) {
    mix(static_cast<std::uint64_t>(policy.shares));
    mix(static_cast<std::uint64_t>(policy.keeps_parameters) * 2 + static_cast<std::uint64_t>(policy.keeps_gradients));
    mix(static_cast<std::uint64_t>(policy.param) * 16 + static_cast<std::uint64_t>(policy.reduce));
  }
  for (const CutUnit& unit : units) {
    mix(std::hash<std::string>()(unit.name));
    for (const NamedParameter& p : unit.parameters) {
      mix(std::hash<std::string>()(p.name));
      mix(static_cast<std::uint64_t>(p.tensor.scalar_type()) * 2 +
          static_cast<std::uint64_t>(p.tensor.requires_grad()));
      for (const std::int64_t size : p.tensor.sizes()) mix(static_cast<std::uint64_t>(size));
      for (const std::int64_t stride : p.tensor.strides()) mix(static_cast<std::uint64_t>(stride));
      if (const DeferredStorage* deferred = DeferredStorage::of(p.tensor)) mix(deferred->hash());
      for (const std::string& name : p.tied_names) mix(std::hash<std::string>()(name));
      ++own.parameters;
      own.numel += p.tensor.numel();
    }
  }
  for (const auto& item : module.named_buffers()) {
    mix(std::hash<std::string>()(item.key()));
    if (item.value().defined()) mix(static_cast<std::uint64_t>(item.value().nbytes()));
  }
  std::vector<Summary> all(static_cast<std::size_t>(context.world_size()));
  context.communicator().all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  for (int rank = 1; rank < context.world_size(); ++rank) {
    const Summary& other = all[static_cast<std::size_t>(rank)];
    if (other == all[0]) continue;
    throw InvalidArgument(
        fmt::format("fsdp::shard: rank {} has another model, other units or other options than rank 0 ({} "
                    "parameters of {} elements, rank 0 {} of {}); build the same on every rank",
                    rank, other.parameters, other.numel, all[0].parameters, all[0].numel),
        rank);
  }
}

}  // namespace

Engine shard(const Context& context, std::shared_ptr<torch::nn::Module> module, const ShardOptions& options) {
  if (module == nullptr) throw InvalidArgument("fsdp::shard: expected a module, got a null pointer");
  if (options.prefetch < 0 || options.prefetch > 62) {
    throw InvalidArgument(fmt::format("fsdp::shard: expected prefetch in 0..62, got {}", options.prefetch));
  }
  std::vector<CutUnit> units = cut_units(*module, options.units);
  const std::vector<UnitPolicy> policies = resolve_policies(units, options, context.world_size());
  check_same_model(context, *module, units, policies, options);
  return Engine(std::make_unique<EngineState>(context, std::move(module), std::move(units), policies, options));
}

Engine::Engine(std::unique_ptr<EngineState> state) : state_(std::move(state)) {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

Optimizer Engine::optimizer(AdamW options) { return state_->make_optimizer(std::move(options)); }
Optimizer Engine::optimizer(Adam options) { return state_->make_optimizer(std::move(options)); }
Optimizer Engine::optimizer(SGD options) { return state_->make_optimizer(std::move(options)); }
void Engine::save(const std::filesystem::path& dir, const SaveOptions& options) { state_->save(dir, options); }
std::optional<std::int64_t> Engine::resume(const std::filesystem::path& dir, const ResumeOptions& options) {
  return state_->resume(dir, options);
}
void Engine::consolidate(const std::filesystem::path& file, const SaveOptions& options) {
  state_->consolidate(file, options);
}
void Engine::load_consolidated(const std::filesystem::path& file, const LoadOptions& options) {
  state_->load_consolidated(file, options);
}
std::vector<ShardView> Engine::shard_views() const { return state_->shard_views(); }
std::vector<ShardView> Engine::gradient_views() { return state_->gradient_views(); }
Optimizer Engine::optimizer(Muon options) { return state_->make_optimizer(std::move(options)); }
Optimizer Engine::optimizer(TorchOptimizer options) { return state_->make_optimizer(std::move(options)); }
void Engine::keep_ema(const Ema& options) { state_->keep_ema(options); }
AveragedWeights Engine::use_ema() { return AveragedWeights(*state_); }
at::Tensor Engine::weigh(const at::Tensor& mean_loss, double samples) { return state_->weigh(mean_loss, samples); }
void Engine::attempt(const std::function<void()>& body) { state_->attempt(body); }
NoSync Engine::no_sync() { return NoSync(*state_); }
KeepGathered Engine::keep_gathered() { return KeepGathered(*state_); }
Summoned Engine::summon(const SummonOptions& options) { return Summoned(*state_, options); }
MemoryReport Engine::memory() const { return state_->memory(); }
Plan Engine::plan() const { return state_->plan(); }
std::int64_t Engine::step() const { return state_->steps(); }

StepResult Optimizer::step(const StepOptions& options) { return engine_->step(options); }
void Optimizer::zero_grad() { engine_->zero_grad(); }
void Optimizer::set_lr(double lr) { engine_->optimizer().set_lr(lr); }
double Optimizer::lr() const { return engine_->optimizer().lr(); }
void Optimizer::set_schedule(Schedule schedule) { engine_->set_schedule(std::move(schedule)); }

}  // namespace fsdp
