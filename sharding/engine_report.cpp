// What an engine shows of itself: views of its shards, the bytes it holds, its plan.
#include <algorithm>

#include <ATen/Parallel.h>

#include "sharding/engine_state.h"

namespace fsdp {

ShardView EngineState::view_of(const ShardedParameter& p, ShardKind kind, DType dtype, std::string prefix,
                               std::byte* shard) const {
  return {.name = std::move(prefix) + p.name,
          .kind = kind,
          .dtype = dtype,
          .shape = p.tensor.sizes().vec(),
          .strides = p.tensor.strides().vec(),
          .begin = p.piece.begin,
          .end = p.piece.end,
          .data = shard + static_cast<std::size_t>(p.piece.shard_offset) * size_of(dtype),
          .replica = core_.unit(p.unit).mesh.replica()};
}

std::vector<ShardView> EngineState::shard_views() const {
  std::vector<ShardView> views;
  for (const ShardedParameter& p : core_.model.parameters) {
    const FlatGroup& group = core_.model.group_of(p);
    views.push_back(view_of(p, ShardKind::kParameter, group.master_dtype, "", core_.master_shard(group)));
  }
  if (optimizer_ == nullptr) return views;
  const std::vector<std::string> names = optimizer_->state_names();
  for (std::size_t which = 0; which < names.size(); ++which) {
    for (const ShardedParameter& p : core_.model.parameters) {
      if (p.trainable_index < 0) continue;
      const FlatGroup& group = core_.model.group_of(p);
      views.push_back(view_of(p, ShardKind::kOptimizer, group.gradient_dtype(), names[which] + ".",
                              optimizer_->state(which, group)));
    }
  }
  return views;
}

std::vector<ShardView> EngineState::gradient_views() {
  return guarded("Engine::gradient_views", [&] {
    std::unique_lock lock(core_.mutex);
    settle(lock, "Engine::gradient_views");
    std::vector<ShardView> views;
    for (std::size_t i = 0; i < core_.model.parameters.size(); ++i) {
      const ShardedParameter& p = core_.model.parameters[i];
      if (!reducer_.used()[i]) continue;
      const FlatGroup& group = core_.model.group_of(p);
      views.push_back(view_of(p, ShardKind::kGradient, group.gradient_dtype(), "", core_.gradient_shard(group)));
    }
    return views;
  });
}

MemoryReport EngineState::memory() {
  const std::lock_guard lock(core_.mutex);
  return {.parameter_shard_bytes = core_.model.parameter_bytes,
          .master_bytes = core_.model.master_bytes,
          .gradient_shard_bytes = core_.model.gradient_bytes,
          .no_sync_bytes = reducer_.local_bytes(),
          .optimizer_bytes = optimizer_ != nullptr ? optimizer_->state_bytes() : 0,
          .arena_bytes = core_.slots.bytes(),
          .communication_bytes = core_.mailbox.bytes(),
          .resident_bytes = pager_.resident_bytes(),
          .held_gradient_bytes = reducer_.held_bytes(),
          .peak_overflow_bytes = std::max(pager_.peak_overflow_bytes(), reducer_.peak_overflow_bytes()),
          .overflows = pager_.overflows() + reducer_.held_rounds()};
}

Plan EngineState::plan() {
  Plan plan;
  plan.predicted = memory();
  const std::lock_guard lock(core_.mutex);
  plan.world_size = context().world_size();
  plan.backend = context().backend();
  plan.prefetch = core_.prefetch;
  plan.slots = core_.slots.count();
  plan.slot_bytes = core_.model.slot_bytes;
  plan.intra_op_threads = at::get_num_threads();
  plan.dispatch_key = touch_key_name();
  plan.units_by = options_.units.predicate ? "predicate" : !options_.units.names.empty() ? "name" : "size";
  const std::size_t states = optimizer_ != nullptr ? optimizer_->state_names().size() : 0;
  for (const UnitLayout& unit : core_.model.units) {
    plan.units.push_back({.name = unit.name,
                          .parameter_bytes = unit.bytes,
                          .strategy = std::string(name_of(unit.policy.strategy)),
                          .param_dtype = std::string(name_of(unit.policy.param)),
                          .shard_group = unit.mesh.shares});
  }
  for (const ShardedParameter& p : core_.model.parameters) {
    UnitPlan& unit = plan.units[static_cast<std::size_t>(p.unit)];
    const std::int64_t numel = p.tensor.numel();
    unit.numel += numel;
    const std::size_t bytes = bytes_of(numel, core_.model.group_of(p).master_dtype);
    plan.unsharded_bytes += bytes;
    if (p.trainable_index < 0) continue;
    unit.trainable_numel += numel;
    plan.unsharded_bytes += bytes * (1 + states);
  }
  if (const StepPlan* last = core_.timeline.last_plan()) {
    for (const auto& run : last->runs) {
      std::string names;
      for (const int unit : run.units) names += (names.empty() ? "" : "+") + core_.unit_name(unit);
      plan.timeline.push_back(std::move(names));
    }
  }
  return plan;
}

}  // namespace fsdp
