// The scopes that an engine opens: no_sync, keep_gathered, use_ema, summon.
#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/engine_state.h"

namespace fsdp {
namespace {

std::vector<int> all_units(const ShardedModel& model) {
  std::vector<int> units(model.units.size());
  std::iota(units.begin(), units.end(), 0);
  return units;
}

}  // namespace

void EngineState::refuse_within_scopes(std::string_view operation) const {
  if (averaged_) {
    throw InvalidArgument(
        fmt::format("{}: within Engine::use_ema the parameters are their averages; close the scope first", operation));
  }
  if (summoned_) throw InvalidArgument(fmt::format("{}: within Engine::summon; close the scope first", operation));
}

void EngineState::begin_no_sync() {
  refuse_update_in_backward("Engine::no_sync", "a step is one backward");
  if (core_.ordered_sums) {
    throw InvalidArgument(
        "Engine::no_sync with ShardOptions::ordered_sums: gradients that stay local are added up in another order; "
        "leave "
        "one of them out");
  }
  guarded("Engine::no_sync", [&] {
    if (!reducer_.has_local()) meet("Engine::no_sync");
    reducer_.begin_no_sync();
  });
}

void EngineState::begin_keeping() {
  const std::lock_guard lock(core_.mutex);
  pager_.begin_keeping();
}

void EngineState::end_keeping() {
  const std::lock_guard lock(core_.mutex);
  pager_.end_keeping();
}

void EngineState::keep_ema(const Ema& options) {
  if (average_ != nullptr) throw InvalidArgument("Engine::keep_ema: expected one call per engine, got a second");
  average_ = std::make_unique<WeightAverage>(core_, options);
}

void EngineState::begin_averaged() {
  if (average_ == nullptr) throw InvalidArgument("Engine::use_ema: no average is kept; call Engine::keep_ema first");
  refuse_within_scopes("Engine::use_ema");
  refuse_half_updated("Engine::use_ema");
  swap_averages("Engine::use_ema");
  averaged_ = true;
}

void EngineState::end_averaged() {
  averaged_ = false;
  meet_again_if_failed([&] { swap_averages("the end of Engine::use_ema"); });
}

// A rank that has failed within a scope comes to its end, too, after it has told the others.
void EngineState::meet_again_if_failed(const std::function<void()>& end_scope) {
  try {
    end_scope();
  } catch (const StepFailed&) {
    end_scope();
    throw;
  }
}

void EngineState::swap_averages(std::string_view operation) {
  guarded(operation, [&] {
    std::unique_lock lock(core_.mutex);
    pager_.free_all(lock);
    lock.unlock();
    meet(operation);  // no rank gathers the former values any more
    average_->swap();
    for (const ShardedParameter& p : core_.model.parameters) bump_version(p.tensor);  // kept graphs saved other values
    core_.communicator().barrier();
  });
}

OperatorUse EngineState::use_of_all(std::vector<PagedStorage*>& storages, bool writes) const {
  for (const FlatGroup& group : core_.model.groups) storages.push_back(group.storage.get());
  return {.name = "Engine::summon", .storages = storages, .writes = writes};
}

void EngineState::begin_summon(const SummonOptions& options) {
  guarded("Engine::summon", [&] {
    if (summoned_) throw InvalidArgument("Engine::summon: expected no open scope, got a second; close the first");
    refuse_within_scopes("Engine::summon");
    refuse_half_updated("Engine::summon");
    if (options.gradients) refuse_update_in_backward("Engine::summon of gradients", "none are kept");
    if (!options.gradients) meet("Engine::summon");
    const std::vector<int> units = all_units(core_.model);
    std::unique_lock lock(core_.mutex);
    begin_step();
    if (options.gradients) {
      settle(lock, "Engine::summon with gradients");
      reducer_.check_agreement();
    }
    pager_.pin(lock, units);
    lock.unlock();
    try {
      core_.communicator().barrier();  // all have gathered before one writes, and every gradient is complete
    } catch (...) {
      lock.lock();
      pager_.release(units, /*discard=*/true);
      throw;
    }
    summoned_ = true;
    std::vector<PagedStorage*> storages;
    save_shares(use_of_all(storages, /*writes=*/true));
    if (!options.gradients) return;
    shows_gradients_ = true;
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      const ShardedParameter& p = core_.model.parameters[i];
      if (reducer_.used()[i])
        p.tensor.mutable_grad() = core_.whole_gradient(p).to(to_scalar_type(core_.model.group_of(p).dtype));
    }
  });
}

void EngineState::end_summon(const SummonOptions& options) {
  const std::vector<int> units = all_units(core_.model);
  struct Unpin {
    EngineState& engine;
    const std::vector<int>& units;
    ~Unpin() {
      const std::lock_guard lock(engine.core_.mutex);
      engine.pager_.release(units, /*discard=*/true);  // pointers may have written anything
      engine.summoned_ = engine.shows_gradients_ = false;
    }
  } const unpin{*this, units};
  for (std::size_t i = 0; options.gradients && i < gradients_.size(); ++i) {
    const ShardedParameter& p = core_.model.parameters[i];
    if (!reducer_.used()[i]) continue;
    p.tensor.mutable_grad() = gradients_[i].taken ? p.placeholder : at::Tensor();
  }
  std::vector<PagedStorage*> storages;
  const OperatorUse all = use_of_all(storages, /*writes=*/true);
  if (!options.writeback) restore_shares(all);
  meet_again_if_failed([&] {
    guarded("Engine::summon", [&] {
      // No rank gathers from one whose share still holds what a pointer has written, nor reads one that is written back.
      meet("the end of Engine::summon");
      if (options.writeback) write_back(all);
    });
  });
}

NoSync::NoSync(EngineState& engine) : engine_(&engine) { engine.begin_no_sync(); }
NoSync::~NoSync() {
  if (engine_ != nullptr) engine_->end_no_sync();
}

KeepGathered::KeepGathered(EngineState& engine) : engine_(&engine) { engine.begin_keeping(); }
KeepGathered::~KeepGathered() {
  if (engine_ != nullptr) engine_->end_keeping();
}

AveragedWeights::AveragedWeights(EngineState& engine) : engine_(&engine) { engine.begin_averaged(); }
void AveragedWeights::close() {
  if (engine_ != nullptr) std::exchange(engine_, nullptr)->end_averaged();
}
AveragedWeights::~AveragedWeights() {
  try {
    close();
  } catch (...) {
    // What has aborted the group is thrown by the next collective; a step that another rank gives up ends with the scope.
  }
}

Summoned::Summoned(EngineState& engine, const SummonOptions& options) : engine_(&engine), options_(options) {
  engine.begin_summon(options);
}
void Summoned::close() {
  if (engine_ != nullptr) std::exchange(engine_, nullptr)->end_summon(options_);
}
Summoned::~Summoned() {
  try {
    close();
  } catch (...) {
    // As above.
  }
}

}  // namespace fsdp
