#include "sharding/engine_core.h"

#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

namespace fsdp {
namespace {

std::vector<int> trainable_counts(const ShardedModel& model) {
  std::vector<int> counts;
  for (const UnitLayout& unit : model.units) counts.push_back(static_cast<int>(unit.trainable.size()));
  return counts;
}

}  // namespace

at::Tensor zeroed_bytes(std::size_t bytes) {
  const c10::InferenceMode normal_mode(false);
  return at::zeros({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte));
}

EngineCore::EngineCore(const Context& the_context, std::vector<CutUnit> units, int shares, int the_prefetch,
                       StorageOwner* owner)
    : context(the_context),
      mesh{the_context.world_size(), the_context.rank(), shares},
      prefetch(the_prefetch),
      model(std::move(units), mesh, owner),
      parameters(communicator().allocate(model.parameter_shard_bytes)),
      gradients(communicator().allocate(model.state_shard_bytes)),
      mailbox(communicator(), mesh, static_cast<int>(model.units.size()), slots_for(prefetch)),
      slots(communicator(), mailbox, slots_for(prefetch), model.slot_bytes),
      timeline(trainable_counts(model), prefetch),
      stream(communicator(), [this] { changed.notify_all(); }) {}

std::string EngineCore::describe(std::string_view operation, int unit) const {
  return fmt::format("{} of unit {} (rank {}, step {})", operation, unit_name(unit), context.rank(), step.load());
}

bool EngineCore::wait_is_over(int slot, std::chrono::steady_clock::time_point began) const {
  // Far longer than ranks that do alike are apart. A peer that is blocked where the engine cannot see it, in a call
  // outside of the library, costs memory after this, never a hang.
  constexpr std::chrono::seconds kPatience{5};
  return slots.is_drained(slot) || mailbox.is_deadlocked() || std::chrono::steady_clock::now() - began > kPatience;
}

void EngineCore::check() const {
  stream.check();
  communicator().check();
}

}  // namespace fsdp
