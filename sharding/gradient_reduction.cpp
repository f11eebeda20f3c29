// What becomes of a round that all ranks have published: each rank sums its own share. On the engine's thread; for a small
// unit on the thread that finds it ready.
#include <algorithm>
#include <cstring>

#include <c10/util/SmallVector.h>

#include "sharding/gradient_reducer.h"

namespace fsdp {
namespace {

std::size_t gradient_bytes(const FlatGroup& group, std::int64_t numel) {
  return bytes_of(numel, group.gradient_dtype());
}

}  // namespace

void GradientReducer::reduce(const std::shared_ptr<Round>& round) {
  if (round->accumulates) restart(*round);
  for (const int index : core_.unit(round->unit).groups) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
    if (group.trainable) reduce_group(*round, group);
  }
  core_.mailbox.consume(round->unit, round->generation);
  const auto is_summed = [this, round] { return core_.mailbox.is_summed(round->unit, round->generation); };
  if (is_summed()) {
    complete(*round);
  } else {
    core_.stream.enqueue({.ready = is_summed,
                          .run = [this, round] { complete(*round); },
                          .what = core_.describe("reduce", round->unit)});
  }
}

void GradientReducer::reduce_group(const Round& round, const FlatGroup& group) {
  const UnitLayout& unit = core_.unit(round.unit);
  const auto ranks = static_cast<std::size_t>(core_.communicator().world_size());
  const ElementRange part = unit.mesh.part_of_share(group.layout->shard_numel(), unit.mesh.replica());
  const std::int64_t begin = unit.mesh.share() * group.layout->shard_numel() + part.offset;
  c10::SmallVector<ReduceInput, 16> inputs(ranks);
  c10::SmallVector<DType, 16> dtypes(ranks, group.reduce_dtype);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::uint64_t location = core_.mailbox.location(static_cast<int>(rank), round.unit, round.generation);
    if (location == ReduceMailbox::kAbsent) continue;
    const Buffer buffer = buffer_at(location, group);
    inputs[rank] = {buffer.segment, buffer.offset + bytes_of(begin, buffer.dtype)};
    dtypes[rank] = buffer.dtype;
  }
  std::vector<at::Tensor> widened;
  const DType dtype = unify(std::span(inputs.data(), ranks), std::span(dtypes.data(), ranks), part.numel, widened);
  std::byte* output = core_.gradient_shard(group) + gradient_bytes(group, part.offset);
  const bool ordered = core_.ordered_sums;
  if (ordered && !round.accumulates) std::memset(output, 0, gradient_bytes(group, part.numel));
  core_.communicator().reduce({.inputs = std::span(inputs.data(), ranks),
                               .numel = part.numel,
                               .input_dtype = dtype,
                               .output = output,
                               .accumulate = round.accumulates && !ordered,
                               .in_order = ordered,
                               .divisor = ordered ? 1 : core_.communicator().world_size(),
                               .label = unit.name});
  if (!ordered) take_squares(group);
}

// Local gradients are fp32, those in a slot may be narrower; ranks that differ in their use of no_sync() mix the two.
DType GradientReducer::unify(std::span<ReduceInput> inputs, std::span<const DType> dtypes, std::int64_t numel,
                             std::vector<at::Tensor>& widened) const {
  const auto wider = [](DType a, DType b) { return size_of(a) < size_of(b); };
  const DType widest = *std::max_element(dtypes.begin(), dtypes.end(), wider);
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    if (inputs[rank].source == nullptr || dtypes[rank] == widest) continue;
    std::vector<std::byte> narrow(bytes_of(numel, dtypes[rank]));
    core_.communicator().read(*inputs[rank].source, static_cast<int>(rank), inputs[rank].offset, narrow);
    widened.push_back(zeroed_bytes(bytes_of(numel, widest)));
    auto* data = static_cast<std::byte*>(widened.back().mutable_data_ptr());
    cast_elements(data, widest, narrow.data(), dtypes[rank], numel);
    inputs[rank] = {.local = data};
  }
  return widest;
}

void GradientReducer::take_squares(const FlatGroup& group) {
  for (const int index : group.parameters) {
    const ElementRange own = core_.summed_here(core_.model.parameters[static_cast<std::size_t>(index)]);
    squares_[static_cast<std::size_t>(index)] = norm_part(
        core_.gradient_shard(group) + gradient_bytes(group, own.offset), own.numel, group.gradient_dtype(), 2);
  }
}

// Copies the parts of this rank's share that its other owners have summed.
void GradientReducer::complete(Round& round) {
  const UnitLayout& unit = core_.unit(round.unit);
  for (const int index : unit.groups) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
    if (!group.trainable) continue;
    for (int replica = 0; replica < unit.mesh.replicas(); ++replica) {
      if (replica == unit.mesh.replica()) continue;
      const ElementRange part = unit.mesh.part_of_share(group.layout->shard_numel(), replica);
      const std::size_t begin = gradient_bytes(group, part.offset);
      core_.communicator().read(*core_.gradients, unit.mesh.rank_of(replica, unit.mesh.share()),
                                core_.gradient_offset(group) + begin,
                                {core_.gradient_shard(group) + begin, gradient_bytes(group, part.numel)});
    }
  }
  if (core_.update_in_backward) update(round);
  move_to(round.state, GradientState::kReduced, unit.name);
  core_.mailbox.complete(round.unit, round.generation);
}

// NOTE [Update in backward]
void GradientReducer::update(const Round& round) {
  bool all_used = true;
  for (int rank = 0; rank < core_.communicator().world_size(); ++rank)
    all_used &= (core_.mailbox.location(rank, round.unit, round.generation) & kPartial) == 0;
  if (!all_used) {
    // Whoever publishes less than all has all ranks' announcements, so this rank is about to read them, too.
    std::unique_lock lock(core_.mutex);
    core_.wait(lock, [this] { return agreed_; });
  }
  update_(round.unit, all_used);
}

// What the user has cleared no longer counts: the round's own gradients are all there is.
void GradientReducer::restart(const Round& round) {
  for (const int parameter : round.restarts) {
    const ShardedParameter& p = core_.model.parameters[static_cast<std::size_t>(parameter)];
    const FlatGroup& group = core_.model.group_of(p);
    std::memset(core_.gradient_shard(group) + gradient_bytes(group, p.piece.shard_offset), 0,
                gradient_bytes(group, p.piece.numel()));
  }
}

}  // namespace fsdp
