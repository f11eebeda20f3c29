#include <fsdp/engine.h>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/engine_state.h"
#include "sharding/model_agreement.h"

namespace fsdp {

Engine shard(const Context& context, std::shared_ptr<torch::nn::Module> module, const ShardOptions& options) {
  if (module == nullptr) throw InvalidArgument("fsdp::shard: expected a module, got a null pointer");
  std::vector<CutUnit> units;
  std::vector<UnitPolicy> policies;
  check_same(context.communicator(), "fsdp::shard", "another model, other units or other options", [&] {
    if (options.prefetch < 0 || options.prefetch > 62) {
      throw InvalidArgument(fmt::format("fsdp::shard: expected prefetch in 0..62, got {}", options.prefetch));
    }
    units = cut_units(*module, options.units);
    policies = resolve_policies(units, options, context.world_size());
    return describe_model(*module, units, policies, options);
  });
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
at::Tensor Engine::cast_input(const at::Tensor& input) const { return state_->cast_input(input); }
std::vector<at::Tensor> Engine::cast_outputs(std::vector<at::Tensor> outputs) {
  return state_->cast_outputs(std::move(outputs));
}
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
void Optimizer::set_lr(double lr) { engine_->set_lr(lr); }
double Optimizer::lr() const { return engine_->optimizer().lr(); }
void Optimizer::set_schedule(Schedule schedule) { engine_->set_schedule(std::move(schedule)); }

}  // namespace fsdp
