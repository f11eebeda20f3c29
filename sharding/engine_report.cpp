// What an engine shows of itself: views of its shards, the bytes it holds, its plan.
#include <algorithm>

#include <ATen/Parallel.h>

#include "sharding/engine_state.h"

namespace fsdp {

std::vector<ShardView> EngineState::shard_views() const {
  std::vector<ShardView> views;
  const auto add = [&](const ShardedParameter& p, ShardKind kind, DType dtype, std::string prefix, std::byte* shard) {
    views.push_back(
        view_of_piece(core_, p, kind, dtype, std::move(prefix), shard + bytes_of(p.piece.shard_offset, dtype)));
  };
  for (const ShardedParameter& p : core_.model.parameters) {
    const FlatGroup& group = core_.model.group_of(p);
    add(p, ShardKind::kParameter, group.master_dtype, "", core_.master_shard(group));
  }
  if (optimizer_ != nullptr) optimizer_->append_views(views);
  for (const ShardedParameter& p : core_.model.parameters) {
    const FlatGroup& group = core_.model.group_of(p);
    if (average_ != nullptr && group.trainable)
      add(p, ShardKind::kOptimizer, group.master_dtype, "ema.", average_->shard(group));
  }
  return views;
}

std::vector<ShardView> EngineState::gradient_views() {
  refuse_update_in_backward("Engine::gradient_views", "none are kept");
  return guarded("Engine::gradient_views", [&] {
    std::unique_lock lock(core_.mutex);
    settle(lock, "Engine::gradient_views");
    reducer_.check_agreement();
    std::vector<ShardView> views;
    for (std::size_t i = 0; i < core_.model.parameters.size(); ++i) {
      const ShardedParameter& p = core_.model.parameters[i];
      if (!reducer_.used()[i]) continue;
      const FlatGroup& group = core_.model.group_of(p);
      const DType dtype = group.gradient_dtype();
      views.push_back(view_of_piece(core_, p, ShardKind::kGradient, dtype, "",
                                    core_.gradient_shard(group) + bytes_of(p.piece.shard_offset, dtype)));
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
          .optimizer_bytes = (optimizer_ != nullptr ? optimizer_->state_bytes() : 0) +
                             (average_ != nullptr ? average_->bytes() : 0),
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
  plan.backend_reason = context().backend_reason();
  plan.prefetch = core_.prefetch;
  plan.slots = core_.slots.count();
  plan.slot_bytes = core_.model.slot_bytes;
  plan.intra_op_threads = at::get_num_threads();
  plan.dispatch_key = touch_key_name();
  plan.units_by = options_.units.predicate ? "predicate" : !options_.units.names.empty() ? "name" : "size";
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
    plan.unsharded_bytes += bytes;
  }
  if (optimizer_ != nullptr) plan.unsharded_bytes += optimizer_->unsharded_state_bytes();
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
