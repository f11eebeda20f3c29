#include "sharding/engine_core.h"

#include <algorithm>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

namespace fsdp {
namespace {

std::vector<PlannedUnit> planned_units(const ShardedModel& model) {
  std::vector<PlannedUnit> units;
  for (const UnitLayout& unit : model.units) {
    units.push_back({.trainable = static_cast<int>(unit.trainable.size()),
                     .keeps_parameters = unit.policy.keeps_parameters,
                     .keeps_gradients = unit.policy.keeps_gradients});
  }
  return units;
}

std::vector<Mesh> meshes_of(const ShardedModel& model) {
  std::vector<Mesh> meshes;
  for (const UnitLayout& unit : model.units) meshes.push_back(unit.mesh);
  return meshes;
}

}  // namespace

at::Tensor zeroed_bytes(std::size_t bytes) {
  const c10::InferenceMode normal_mode(false);
  return at::zeros({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte));
}

EngineCore::EngineCore(const Context& the_context, std::vector<CutUnit> units, const std::vector<UnitPolicy>& policies,
                       const ShardOptions& options, StorageOwner* owner)
    : context(the_context),
      prefetch(options.prefetch),
      ordered_sums(options.ordered_sums),
      update_in_backward(options.update_in_backward),
      model(std::move(units), policies, the_context.world_size(), the_context.rank(), owner),
      parameters(communicator().allocate(model.parameter_bytes)),
      masters(communicator().allocate(model.master_bytes)),
      gradients(communicator().allocate(model.gradient_bytes)),
      // Each undrained generation of a unit holds a slot, its local gradients, or room for the next one.
      mailbox(communicator(), meshes_of(model), slots_for(planned_units(model), prefetch) + 2),
      slots(communicator(), mailbox, slots_for(planned_units(model), prefetch), model.slot_bytes),
      timeline(planned_units(model), prefetch, /*whole_rounds=*/ordered_sums || update_in_backward),
      stream(communicator(), [this] { changed.notify_all(); }) {}

void EngineCore::read_whole(const ShardedParameter& p, const Segment& source, std::size_t offset, std::size_t stride,
                            DType dtype, std::byte* output) const {
  const FlatGroup& group = model.group_of(p);
  const Mesh& mesh = model.unit_of(group).mesh;
  for (int share = 0; share < mesh.shares; ++share) {
    const ShardPiece piece = group.layout->piece(p.index_in_group, share);
    communicator().read(source, mesh.rank_of(mesh.replica(), share),
                        offset + static_cast<std::size_t>(share) * stride + bytes_of(piece.shard_offset, dtype),
                        {output + bytes_of(piece.begin, dtype), bytes_of(piece.numel(), dtype)});
  }
}

at::Tensor EngineCore::whole_gradient(const ShardedParameter& p) const {
  const FlatGroup& group = model.group_of(p);
  const at::Tensor whole = at::empty_strided(p.sizes, p.strides,
                                             at::TensorOptions(to_scalar_type(group.gradient_dtype())));
  read_whole(p, *gradients, group.gradient_offset, group.gradient_stride, group.gradient_dtype(),
             static_cast<std::byte*>(whole.mutable_data_ptr()));
  return whole;
}

ElementRange EngineCore::summed_here(const ShardedParameter& p) const {
  const Mesh& mesh = unit(p.unit).mesh;
  const ElementRange part = mesh.part_of_share(model.group_of(p).layout->shard_numel(), mesh.replica());
  const std::int64_t begin = std::max(p.piece.shard_offset, part.offset),
                     end = std::min(p.piece.shard_offset + p.piece.numel(), part.offset + part.numel);
  return {begin, std::max(end - begin, std::int64_t{0})};
}

void EngineCore::refresh_parameters(const FlatGroup& group) const {
  if (!group.has_master()) return;
  cast_elements(parameter_shard(group), group.dtype, master_shard(group), group.master_dtype,
                group.layout->shard_numel());
}

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
