#include "sharding/gradient_reducer.h"

#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/optimizer_kernels.h"

namespace fsdp {
namespace {

// In a published location: the buffer is in the settlement's overflow segment, not in the arena.
constexpr std::uint64_t kInOverflow = std::uint64_t{1} << 63;

std::size_t gradient_bytes(const FlatGroup& group, std::int64_t numel) {
  return static_cast<std::size_t>(numel) * size_of(state_dtype(group.dtype));
}

}  // namespace

GradientReducer::GradientReducer(EngineCore& core, Pager& pager)
    : core_(core), pager_(pager), units_(core.model.units.size()), used_(core.model.parameters.size()) {}

void GradientReducer::take(std::unique_lock<std::mutex>& lock, int parameter, at::Tensor gradient, bool restarts) {
  const ShardedParameter& p = core_.model.parameters[static_cast<std::size_t>(parameter)];
  flush_pending();
  const Timeline::Arrived arrived = core_.timeline.arrive(p.unit, p.trainable_index);
  if (arrived.ends_previous) end_round(lock, p.unit, kNoSlot, /*frees_unit=*/false);
  Round& round = open_round(p.unit);
  held_bytes_ += gradient.nbytes();
  round.held[static_cast<std::size_t>(p.trainable_index)] = std::move(gradient);
  if (restarts) round.restarts.push_back(parameter);
  if (arrived.ends) {
    end_round(lock, p.unit, arrived.slot, arrived.frees_unit);
  } else if (arrived.packs) {
    open_slot(lock, p.unit, arrived.slot);
  }
}

// Gives a unit's open round a slot and packs what it holds.
void GradientReducer::open_slot(std::unique_lock<std::mutex>& lock, int unit, int planned_slot) {
  const auto& open = units_[static_cast<std::size_t>(unit)].open;
  if (open->slot == kNoSlot) {
    const int slot = find_slot(lock, unit, planned_slot);
    if (slot == kNoSlot) return;
    // The wait let other threads in: a second backward may have opened or ended the round.
    if (open == nullptr || open->slot != kNoSlot) {
      core_.slots.give_back(slot);
      return;
    }
    open->slot = slot;
  }
  pack_held(*open, core_.slots.data(open->slot));
}

GradientReducer::Round& GradientReducer::open_round(int unit) {
  auto& open = units_[static_cast<std::size_t>(unit)].open;
  if (open == nullptr) {
    open = std::make_unique<Round>();
    open->unit = unit;
    open->held.resize(core_.model.units[static_cast<std::size_t>(unit)].trainable.size());
    open->packed.resize(open->held.size());
    move_to(open->state, GradientState::kFilling, core_.unit_name(unit));
  }
  return *open;
}

void GradientReducer::end_round(std::unique_lock<std::mutex>& lock, int unit, int planned_slot, bool frees_unit) {
  if (frees_unit) pager_.free_if_idle(unit);
  UnitRounds& rounds = units_[static_cast<std::size_t>(unit)];
  std::unique_ptr<Round> round = std::move(rounds.open);
  // Generations of a unit are published in order, so a round behind a waiting one waits too.
  if (rounds.pending == 0 && round->slot == kNoSlot) round->slot = find_slot(lock, unit, planned_slot);
  if (rounds.pending == 0 && round->slot != kNoSlot) {
    publish(std::move(round));
    return;
  }
  ++rounds.pending;
  ++held_rounds_;
  pending_.push_back(std::move(round));
}

// A slot taken for a unit's gradients, or kNoSlot.
int GradientReducer::find_slot(std::unique_lock<std::mutex>& lock, int unit, int planned_slot) {
  const int slot = planned_slot != kNoSlot && core_.slots.is_free(planned_slot) ? planned_slot
                                                                                : core_.slots.find_free();
  if (slot == kNoSlot) return kNoSlot;
  core_.slots.take(slot);
  if (!core_.slots.is_drained(slot)) {
    const Slots::Drain drain = core_.slots.drain_of(slot);
    core_.mailbox.set_waiting(drain.unit, drain.generation);
    lock.unlock();
    core_.communicator().wait_until(
        [&, began = std::chrono::steady_clock::now()] { return core_.wait_is_over(slot, began); },
        core_.describe("the buffer for gradients", unit));
    lock.lock();
    core_.mailbox.set_running();
  }
  if (core_.slots.is_drained(slot)) return slot;
  core_.slots.give_back(slot);
  return kNoSlot;
}

void GradientReducer::flush_pending() {
  while (!pending_.empty()) {
    Round& next = *pending_.front();
    if (next.slot == kNoSlot) {
      const int slot = core_.slots.find_free();
      if (slot == kNoSlot || !core_.slots.is_drained(slot)) return;
      core_.slots.take(slot);
      next.slot = slot;
    }
    std::unique_ptr<Round> round = std::move(pending_.front());
    pending_.pop_front();
    --units_[static_cast<std::size_t>(round->unit)].pending;
    publish(std::move(round));
  }
}

void GradientReducer::pack_held(Round& round, std::byte* buffer) {
  const at::NoGradGuard no_grad;
  const UnitLayout& unit = core_.model.units[static_cast<std::size_t>(round.unit)];
  for (std::size_t i = 0; i < round.held.size(); ++i) {
    at::Tensor& gradient = round.held[i];
    if (!gradient.defined()) continue;
    const ShardedParameter& p = core_.model.parameters[static_cast<std::size_t>(unit.trainable[i])];
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(p.group)];
    const std::int64_t offset = group.layout->parameters()[p.index_in_group].offset;
    std::byte* target = buffer + group.slot_offset + static_cast<std::size_t>(offset) * size_of(group.dtype);
    if (gradient.strides() == p.tensor.strides() && gradient.scalar_type() == p.tensor.scalar_type() &&
        !gradient.is_neg()) {
      std::memcpy(target, gradient.const_data_ptr(), gradient.nbytes());
    } else {
      make_plain_view(target, p.tensor).copy_(gradient);
    }
    held_bytes_ -= gradient.nbytes();
    gradient.reset();
    round.packed[i] = true;
  }
}

void GradientReducer::zero_missing(const Round& round, std::byte* buffer) const {
  const UnitLayout& unit = core_.model.units[static_cast<std::size_t>(round.unit)];
  const auto zero = [&](const FlatGroup& group, const ElementRange& range) {
    const std::size_t element_bytes = size_of(group.dtype);
    std::memset(buffer + group.slot_offset + static_cast<std::size_t>(range.offset) * element_bytes, 0,
                static_cast<std::size_t>(range.numel) * element_bytes);
  };
  for (std::size_t i = 0; i < round.packed.size(); ++i) {
    if (round.packed[i]) continue;
    const ShardedParameter& p = core_.model.parameters[static_cast<std::size_t>(unit.trainable[i])];
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(p.group)];
    zero(group, group.layout->parameters()[p.index_in_group]);
  }
  for (const int index : unit.groups) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
    if (!group.trainable) continue;
    for (const ElementRange& gap : group.layout->gaps()) zero(group, gap);
  }
}

void GradientReducer::publish(std::unique_ptr<Round> round) {
  const bool in_arena = round->slot != kNoSlot;
  std::byte* buffer = in_arena ? core_.slots.data(round->slot) : overflow_->local().data() + overflow_offset_;
  const std::uint64_t location = in_arena ? core_.slots.location(round->slot) : overflow_offset_ | kInOverflow;
  pack_held(*round, buffer);
  zero_missing(*round, buffer);
  begin_generation(*round);
  move_to(round->state, GradientState::kReducing, core_.unit_name(round->unit));
  if (in_arena) {
    core_.slots.drain(round->slot, round->unit, round->generation);
  } else {
    overflow_offset_ += core_.model.slot_bytes;
  }
  core_.mailbox.publish(round->unit, round->generation, location);
  enqueue_reduction(std::move(round));
}

void GradientReducer::begin_generation(Round& round) {
  UnitRounds& rounds = units_[static_cast<std::size_t>(round.unit)];
  round.accumulates = rounds.generation > rounds.first_generation;
  round.generation = ++rounds.generation;
}

void GradientReducer::publish_absent(int unit) {
  auto round = std::make_shared<Round>();
  round->unit = unit;
  begin_generation(*round);
  move_to(round->state, GradientState::kReducing, core_.unit_name(unit));
  core_.mailbox.publish(unit, round->generation, ReduceMailbox::kAbsent);
  enqueue_reduction(std::move(round));
}

void GradientReducer::enqueue_reduction(std::shared_ptr<Round> round) {
  const int unit = round->unit;
  const std::uint64_t generation = round->generation;
  core_.stream.enqueue({.ready = [this, unit, generation] { return core_.mailbox.is_reducible(unit, generation); },
                        .run = [this, round = std::move(round)] { reduce(round); },
                        .what = core_.describe("reduce", unit)});
}

void GradientReducer::reduce(const std::shared_ptr<Round>& round) {
  const UnitLayout& unit = core_.model.units[static_cast<std::size_t>(round->unit)];
  Communicator& communicator = core_.communicator();
  std::vector<const std::byte*> buffers, inputs(static_cast<std::size_t>(communicator.world_size()));
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    const std::uint64_t location = core_.mailbox.location(rank, round->unit, round->generation);
    if (location == ReduceMailbox::kAbsent) {
      buffers.push_back(nullptr);
    } else if ((location & kInOverflow) != 0) {
      buffers.push_back(overflow_->peer(rank).data() + (location & ~kInOverflow));
    } else {
      buffers.push_back(core_.slots.segment().peer(rank).data() + location);
    }
  }
  if (round->accumulates) restart(*round);
  for (const int index : unit.groups) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
    if (!group.trainable) continue;
    const ElementRange part = core_.mesh.part_of_share(group.layout->shard_numel(), core_.mesh.replica());
    const std::size_t begin = group.slot_offset + static_cast<std::size_t>(core_.mesh.share()) * group.shard_bytes() +
                              static_cast<std::size_t>(part.offset) * size_of(group.dtype);
    for (std::size_t rank = 0; rank < inputs.size(); ++rank)
      inputs[rank] = buffers[rank] != nullptr ? buffers[rank] + begin : nullptr;
    communicator.reduce({.inputs = inputs,
                         .numel = part.numel,
                         .input_dtype = group.dtype,
                         .output = core_.gradient_shard(group) + gradient_bytes(group, part.offset),
                         .accumulate = round->accumulates,
                         .divisor = communicator.world_size(),
                         .label = unit.name});
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

// Copies the parts of this rank's share that its other owners have summed.
void GradientReducer::complete(Round& round) {
  const UnitLayout& unit = core_.model.units[static_cast<std::size_t>(round.unit)];
  for (const int index : unit.groups) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
    if (!group.trainable) continue;
    for (int replica = 0; replica < core_.mesh.replicas(); ++replica) {
      if (replica == core_.mesh.replica()) continue;
      const ElementRange part = core_.mesh.part_of_share(group.layout->shard_numel(), replica);
      const std::size_t begin = gradient_bytes(group, part.offset);
      core_.communicator().read(*core_.gradients, core_.mesh.rank_of(replica, core_.mesh.share()),
                                group.state_offset + begin,
                                {core_.gradient_shard(group) + begin, gradient_bytes(group, part.numel)});
    }
  }
  move_to(round.state, GradientState::kReduced, unit.name);
  core_.mailbox.complete(round.unit, round.generation);
}

// What the user has cleared no longer counts: the round's own gradients are all there is.
void GradientReducer::restart(const Round& round) {
  for (const int parameter : round.restarts) {
    const ShardedParameter& p = core_.model.parameters[static_cast<std::size_t>(parameter)];
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(p.group)];
    std::memset(core_.gradient_shard(group) + gradient_bytes(group, p.piece.shard_offset), 0,
                gradient_bytes(group, p.piece.numel()));
  }
}

void GradientReducer::forget() {
  for (UnitRounds& rounds : units_) rounds.first_generation = rounds.generation;
}

// What each rank tells the others at a settlement, followed by each unit's generation and each parameter's use.
struct GradientReducer::Announcement {
  char operation[32];
  std::int64_t step;
  std::uint64_t overflow_slots;
};

std::vector<std::byte> GradientReducer::announce(const Announcement& announcement,
                                                 const std::vector<bool>& used_here) const {
  std::vector<std::byte> bytes(sizeof(announcement) + units_.size() * sizeof(std::uint64_t) +
                               used_here.size() * sizeof(bool));
  std::byte* next = bytes.data();
  const auto put = [&](const auto value) {
    std::memcpy(next, &value, sizeof(value));
    next += sizeof(value);
  };
  put(announcement);
  for (const UnitRounds& rounds : units_) put(rounds.generation + static_cast<std::uint64_t>(rounds.pending));
  for (const bool used : used_here) put(used);
  return bytes;
}

GradientReducer::Agreement GradientReducer::agree(std::unique_lock<std::mutex>& lock, std::string_view operation,
                                                  const std::vector<bool>& used_here) {
  Announcement mine{{}, core_.step.load(), 0};
  for (const auto& round : pending_) mine.overflow_slots += round->slot == kNoSlot;
  std::memcpy(mine.operation, operation.data(), std::min(operation.size(), sizeof(mine.operation) - 1));
  const std::vector<std::byte> own = announce(mine, used_here);
  std::vector<std::byte> all(own.size() * static_cast<std::size_t>(core_.communicator().world_size()));
  // Peers still in backward may wait for reductions of this rank's stream, which needs the mutex.
  lock.unlock();
  core_.communicator().all_gather(own, all);
  lock.lock();

  Agreement agreement{std::vector<std::uint64_t>(units_.size()), 0};
  std::fill(used_.begin(), used_.end(), false);
  const std::byte* next = all.data();
  const auto take = [&](auto value) {
    std::memcpy(&value, next, sizeof(value));
    next += sizeof(value);
    return value;
  };
  for (int rank = 0; rank < core_.communicator().world_size(); ++rank) {
    const Announcement theirs = take(Announcement{});
    if (operation != theirs.operation || theirs.step != mine.step) {
      throw CommunicationError(
          fmt::format("rank {} called {} at step {} while rank {} called {} at step {}; every rank must make the same "
                      "calls in the same order",
                      core_.context.rank(), operation, mine.step, rank, theirs.operation, theirs.step),
          rank);
    }
    agreement.overflow_slots = std::max(agreement.overflow_slots, theirs.overflow_slots);
    for (std::uint64_t& generation : agreement.generations) generation = std::max(generation, take(generation));
    for (std::size_t p = 0; p < used_.size(); ++p) used_[p] = take(false) || used_[p];
  }
  return agreement;
}

void GradientReducer::settle(std::unique_lock<std::mutex>& lock, std::string_view operation,
                             const std::vector<bool>& used_here) {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (units_[static_cast<std::size_t>(unit)].open == nullptr) continue;
    core_.timeline.cut_round(unit);
    end_round(lock, unit, kNoSlot, /*frees_unit=*/false);
  }
  flush_pending();
  const auto [generations, overflow_slots] = agree(lock, operation, used_here);
  if (overflow_slots > 0) {
    overflow_ = core_.communicator().allocate(overflow_slots * core_.model.slot_bytes);
    peak_overflow_bytes_ = std::max(peak_overflow_bytes_, overflow_->bytes());
    core_.communicator().barrier();  // a peer's stream may read what is published next, so it must have its handle
  }
  overflow_offset_ = 0;
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit)
    publish_rest(lock, unit, generations[static_cast<std::size_t>(unit)], operation);
  // All ranks are here and publish everything, so every reduction ends; a buffer may be reused once all have read it.
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    wait_settled(lock, unit, generations[static_cast<std::size_t>(unit)], operation);
  }
  overflow_.reset();
}

void GradientReducer::publish_rest(std::unique_lock<std::mutex>& lock, int unit, std::uint64_t last_generation,
                                   std::string_view operation) {
  UnitRounds& rounds = units_[static_cast<std::size_t>(unit)];
  while (rounds.generation < last_generation) {
    // The mailbox holds so many undrained generations of a unit. Units go in the same order on every rank, so the wait
    // ends.
    const auto depth = static_cast<std::uint64_t>(slots_for(core_.prefetch));
    if (rounds.generation >= depth) wait_settled(lock, unit, rounds.generation + 1 - depth, operation);
    const auto next = std::find_if(pending_.begin(), pending_.end(),
                                   [&](const auto& round) { return round->unit == unit; });
    if (next == pending_.end()) {
      publish_absent(unit);
      continue;
    }
    std::unique_ptr<Round> round = std::move(*next);
    pending_.erase(next);
    --rounds.pending;
    publish(std::move(round));
  }
}

void GradientReducer::wait_settled(std::unique_lock<std::mutex>& lock, int unit, std::uint64_t generation,
                                   std::string_view operation) {
  if (core_.mailbox.is_settled(unit, generation)) return;
  lock.unlock();
  core_.communicator().wait_until([&] { return core_.mailbox.is_settled(unit, generation); },
                                  fmt::format("{} in {}", core_.describe("reduce", unit), operation));
  lock.lock();
}

}  // namespace fsdp
