// The scopes that an engine opens: no_sync, keep_gathered, summon.
#include <algorithm>
#include <numeric>

#include <ATen/ops/empty_strided.h>

#include <fsdp/error.h>

#include "sharding/engine_state.h"

namespace fsdp {

void EngineState::begin_no_sync() {
  guarded("Engine::no_sync", [&] { reducer_.begin_no_sync(); });
}

void EngineState::begin_keeping() {
  const std::lock_guard lock(core_.mutex);
  pager_.begin_keeping();
}

void EngineState::end_keeping() {
  const std::lock_guard lock(core_.mutex);
  pager_.end_keeping();
}

OperatorUse EngineState::use_of_all(std::vector<PagedStorage*>& storages, bool writes) const {
  for (const FlatGroup& group : core_.model.groups) storages.push_back(group.storage.get());
  return {.name = "Engine::summon", .storages = storages, .writes = writes};
}

void EngineState::begin_summon(const SummonOptions& options) {
  guarded("Engine::summon", [&] {
    if (summoned_) throw InvalidArgument("Engine::summon: expected no open scope, got a second; close the first");
    std::vector<int> units(core_.model.units.size());
    std::iota(units.begin(), units.end(), 0);
    std::unique_lock lock(core_.mutex);
    begin_step();
    if (options.gradients) settle(lock, "Engine::summon");
    pager_.pin(lock, units);
    summoned_ = true;
    lock.unlock();
    core_.communicator().barrier();  // all have gathered before one writes, and every gradient is complete
    std::vector<PagedStorage*> storages;
    if (options.writeback) save_shares(use_of_all(storages, /*writes=*/true));
    if (!options.gradients) return;
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      const ShardedParameter& p = core_.model.parameters[i];
      if (reducer_.used()[i]) p.tensor.mutable_grad() = whole_gradient(p);
    }
  });
}

// The mean gradient in the parameter's own type, put together from its owners.
at::Tensor EngineState::whole_gradient(const ShardedParameter& p) const {
  const FlatGroup& group = core_.model.group_of(p);
  const Mesh& mesh = core_.model.unit_of(group).mesh;
  const DType dtype = group.gradient_dtype();
  const at::Tensor whole = at::empty_strided(p.sizes, p.strides, at::TensorOptions(to_scalar_type(dtype)));
  auto* bytes = static_cast<std::byte*>(whole.mutable_data_ptr());
  for (int share = 0; share < mesh.shares; ++share) {
    const ShardPiece piece = group.layout->piece(p.index_in_group, share);
    core_.communicator().read(*core_.gradients, mesh.rank_of(mesh.replica(), share),
                              group.gradient_offset + static_cast<std::size_t>(share) * group.gradient_stride +
                                  bytes_of(piece.shard_offset, dtype),
                              {bytes + bytes_of(piece.begin, dtype), bytes_of(piece.numel(), dtype)});
  }
  return whole.to(to_scalar_type(group.dtype));
}

void EngineState::end_summon(const SummonOptions& options) {
  std::vector<int> units(core_.model.units.size());
  std::iota(units.begin(), units.end(), 0);
  struct Unpin {
    EngineState& engine;
    const std::vector<int>& units;
    bool wrote;
    ~Unpin() {
      const std::lock_guard lock(engine.core_.mutex);
      engine.pager_.release(units, /*discard=*/wrote);
      for (const int unit : units) engine.pager_.free_if_idle(unit);
      engine.summoned_ = false;
    }
  } const unpin{*this, units, options.writeback};
  for (std::size_t i = 0; options.gradients && i < gradients_.size(); ++i) {
    const ShardedParameter& p = core_.model.parameters[i];
    if (!reducer_.used()[i]) continue;
    p.tensor.mutable_grad() = gradients_[i].taken ? p.placeholder : at::Tensor();
  }
  if (!options.writeback) return;
  guarded("Engine::summon", [&] {
    core_.communicator().barrier();  // no rank still reads shares for its own scope
    std::vector<PagedStorage*> storages;
    write_back(use_of_all(storages, /*writes=*/true));
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
    // Every rank has been told by guarded(); the next collective throws it.
  }
}

}  // namespace fsdp
