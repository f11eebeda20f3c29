#include "sharding/gradient_reducer.h"

#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <fsdp/error.h>

#include "comm/ordered_sum.h"

namespace fsdp {

GradientReducer::GradientReducer(EngineCore& core, Pager& pager)
    : core_(core),
      pager_(pager),
      units_(core.model.units.size()),
      used_(core.model.parameters.size()),
      restarted_at_(used_.size()),
      squares_(used_.size()) {}

void GradientReducer::take(std::unique_lock<std::mutex>& lock, int parameter, at::Tensor gradient,
                           std::span<const int> restarts, bool is_borrowed) {
  const ShardedParameter& p = core_.model.parameters[static_cast<std::size_t>(parameter)];
  const bool keeps = core_.unit(p.unit).policy.keeps_gradients;
  UnitRounds& rounds = units_[static_cast<std::size_t>(p.unit)];
  flush_pending();
  const bool local = accumulates_locally(p.unit);
  const Timeline::Arrived arrived = core_.timeline.arrive(p.unit, p.trainable_index, local || keeps);
  // The mutex stays taken from arrive() to here: another thread's gradient would belong to a round that is not open yet.
  if (arrived.ends_previous && rounds.open != nullptr) end_round(lock, p.unit, {.may_wait = false});
  for (const int restarted : restarts) drop_gradient(restarted);
  if (local) {
    add_locally(p, gradient, restarts);
    if (!arrived.ends) return;
    if (rounds.open != nullptr) end_round(lock, p.unit, {.may_wait = false});
    if (arrived.frees_unit) pager_.free_if_idle(p.unit);
    // Behind a round that waits for a slot it waits, too: what the user has cleared is cleared in the order of rounds.
    if (no_sync_ == 0 && (arrived.last || !keeps) && rounds.pending == 0) publish(std::move(rounds.local));
    return;
  }
  Round& round = open_round(p.unit);
  held_bytes_ += gradient.nbytes();
  const bool packs_now = (arrived.packs || arrived.ends) && round.slot != kNoSlot;
  round.held[static_cast<std::size_t>(p.trainable_index)] = is_borrowed && !packs_now ? gradient.clone()
                                                                                      : std::move(gradient);
  round.restarts.insert(round.restarts.end(), restarts.begin(), restarts.end());
  if (arrived.ends) {
    end_round(lock, p.unit, {.slot = arrived.slot, .frees_unit = arrived.frees_unit});
  } else if (packs_now && !keeps) {
    pack(round, static_cast<std::size_t>(p.trainable_index), core_.slots.location(round.slot));
  } else if (arrived.packs && !keeps) {
    open_slot(lock, p.unit, arrived.slot);
  }
}

bool GradientReducer::accumulates_locally(int unit) const {
  const UnitRounds& rounds = units_[static_cast<std::size_t>(unit)];
  return !rounds.local_is_published &&
         (core_.unit(unit).policy.keeps_gradients || no_sync_ > 0 || rounds.local != nullptr);
}

void GradientReducer::add_locally(const ShardedParameter& p, const at::Tensor& gradient,
                                  std::span<const int> restarts) {
  const at::NoGradGuard no_grad;
  auto& round = units_[static_cast<std::size_t>(p.unit)].local;
  if (round == nullptr) {
    round = make_round(p.unit);
    round->local = true;
  }
  const FlatGroup& group = core_.model.group_of(p);
  const Buffer buffer = buffer_at(kLocal, group);
  std::byte* target = buffer.local() + bytes_of(group.layout->parameters()[p.index_in_group].offset, buffer.dtype);
  const auto index = static_cast<std::size_t>(p.trainable_index);
  const bool adds = round->packed[index];
  if (gradient.strides() == p.tensor.strides() && gradient.scalar_type() == to_scalar_type(group.dtype) &&
      !gradient.is_neg()) {
    const auto* elements = static_cast<const std::byte*>(gradient.const_data_ptr());
    ordered_sum({.inputs = std::span(&elements, 1),
                 .numel = gradient.numel(),
                 .input_dtype = group.dtype,
                 .output = target,
                 .in_order = adds});
  } else {
    at::Tensor sum = make_plain_view(target, p.tensor, buffer.dtype);
    adds ? sum.add_(gradient) : sum.copy_(gradient);
  }
  round->packed[index] = true;
  round->restarts.insert(round->restarts.end(), restarts.begin(), restarts.end());
}

// Gives a unit's open round a slot and packs what it holds.
void GradientReducer::open_slot(std::unique_lock<std::mutex>& lock, int unit, int planned_slot) {
  const auto& open = units_[static_cast<std::size_t>(unit)].open;
  if (open->slot == kNoSlot) {
    const int slot = find_slot(lock, unit, planned_slot, /*may_wait=*/true);
    if (slot == kNoSlot) return;
    // The wait let other threads in: a second backward may have opened or ended the round.
    if (open == nullptr || open->slot != kNoSlot) {
      core_.slots.give_back(slot);
      return;
    }
    open->slot = slot;
  }
  pack_held(*open, core_.slots.location(open->slot));
}

GradientReducer::Round& GradientReducer::open_round(int unit) {
  auto& open = units_[static_cast<std::size_t>(unit)].open;
  if (open == nullptr) {
    check_may_open(unit);
    open = make_round(unit);
  }
  return *open;
}

std::uint64_t GradientReducer::rounds_of_step(int unit) const {
  const UnitRounds& rounds = units_[static_cast<std::size_t>(unit)];
  return rounds.generation + static_cast<std::uint64_t>(rounds.pending) - rounds.first_generation;
}

void GradientReducer::check_may_open(int unit) const {
  if (core_.update_in_backward && !update_) {
    throw InvalidArgument(fmt::format("{}: update_in_backward without an optimizer; call Engine::optimizer first",
                                      core_.describe("backward", unit)));
  }
  if (core_.update_in_backward && is_closed(unit)) {
    throw InvalidArgument(
        fmt::format("{}: a second gradient since the last step, with update_in_backward: the first has updated the "
                    "weights already; call Optimizer::step after each backward, or leave update_in_backward off",
                    core_.describe("backward", unit)));
  }
  if (core_.ordered_sums && rounds_of_step(unit) >= micro_batches_) {
    throw InvalidArgument(
        fmt::format("{}: a gradient of a loss that Engine::weigh has not seen, with ordered_sums: each micro-batch is "
                    "one engine.weigh(loss, samples).backward()",
                    core_.describe("backward", unit)));
  }
}

void GradientReducer::begin_micro_batch(std::unique_lock<std::mutex>& lock) {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (core_.unit(unit).trainable.empty()) continue;
    end_open_round(lock, unit);
    UnitRounds& rounds = units_[static_cast<std::size_t>(unit)];
    while (rounds_of_step(unit) < micro_batches_) {
      std::unique_ptr<Round> empty = make_round(unit);
      if (rounds.pending == 0 && may_publish(*empty)) {
        publish_absent(unit, {});
      } else {
        hold(std::move(empty));
      }
    }
  }
  ++micro_batches_;
}

void GradientReducer::end_open_round(std::unique_lock<std::mutex>& lock, int unit) {
  if (units_[static_cast<std::size_t>(unit)].open == nullptr) return;
  core_.timeline.cut_round(unit);
  end_round(lock, unit, {});
}

bool GradientReducer::is_whole(const Round& round) const {
  for (std::size_t i = 0; i < round.packed.size(); ++i) {
    if (!round.packed[i] && !round.held[i].defined()) return false;
  }
  return true;
}

// The mailbox has an entry for the unit's next generation, and nothing is to be known first.
bool GradientReducer::may_publish(const Round& round) const {
  if (round.waits) return false;
  const std::uint64_t generation = units_[static_cast<std::size_t>(round.unit)].generation;
  const auto depth = static_cast<std::uint64_t>(core_.mailbox.depth());
  return generation < depth || core_.mailbox.is_drained(round.unit, generation + 1 - depth);
}

std::unique_ptr<GradientReducer::Round> GradientReducer::make_round(int unit) const {
  auto round = std::make_unique<Round>();
  round->unit = unit;
  round->held.resize(core_.unit(unit).trainable.size());
  round->packed.resize(round->held.size());
  move_to(round->state, GradientState::kFilling, core_.unit_name(unit));
  return round;
}

void GradientReducer::end_round(std::unique_lock<std::mutex>& lock, int unit, const RoundEnd& end) {
  if (end.frees_unit) pager_.free_if_idle(unit);
  UnitRounds& rounds = units_[static_cast<std::size_t>(unit)];
  std::unique_ptr<Round> round = std::move(rounds.open);
  if (core_.unit(unit).policy.keeps_gradients) {
    merge_late(std::move(round));
    return;
  }
  // Generations of a unit are published in order, so a round behind a waiting one waits too.
  round->waits |= core_.update_in_backward && !is_whole(*round);
  const bool may_go = rounds.pending == 0 && may_publish(*round);
  if (may_go && round->slot == kNoSlot) round->slot = find_slot(lock, unit, end.slot, end.may_wait);
  if (may_go && round->slot != kNoSlot) {
    publish(std::move(round));
  } else {
    hold(std::move(round));
  }
}

void GradientReducer::hold(std::unique_ptr<Round> round) {
  ++units_[static_cast<std::size_t>(round->unit)].pending;
  ++held_rounds_;
  pending_.push_back(std::move(round));
}

// NOTE [Local gradients]: the settlement publishes what came after the local buffer was.
void GradientReducer::merge_late(std::unique_ptr<Round> round) {
  const auto late = std::find_if(pending_.begin(), pending_.end(),
                                 [&](const auto& pending) { return pending->unit == round->unit; });
  if (late == pending_.end()) {
    hold(std::move(round));
    return;
  }
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < round->held.size(); ++i) {
    at::Tensor &sum = (*late)->held[i], &added = round->held[i];
    if (!added.defined()) continue;
    held_bytes_ -= (sum.defined() ? sum.nbytes() : 0) + added.nbytes();
    const int index = core_.unit(round->unit).trainable[i];
    if (sum.defined() && !contains(round->restarts, index)) {
      sum = sum.to(to_scalar_type(state_dtype(to_dtype(sum.scalar_type())))).add(added);
    } else {
      sum = added;
    }
    held_bytes_ += sum.nbytes();
  }
  (*late)->restarts.insert((*late)->restarts.end(), round->restarts.begin(), round->restarts.end());
}

// A slot taken for a unit's gradients, or kNoSlot.
int GradientReducer::find_slot(std::unique_lock<std::mutex>& lock, int unit, int planned_slot, bool may_wait) {
  const int slot = planned_slot != kNoSlot && core_.slots.is_free(planned_slot) ? planned_slot
                                                                                : core_.slots.find_free();
  if (slot == kNoSlot || (!may_wait && !core_.slots.is_drained(slot))) return kNoSlot;
  core_.slots.take(slot);
  if (!core_.slots.is_drained(slot)) {
    ReduceMailbox::Drain awaited;
    core_.mailbox.wait_for(awaited, core_.slots.drain_of(slot));
    lock.unlock();
    core_.communicator().wait_until(
        [&, began = std::chrono::steady_clock::now()] { return core_.wait_is_over(slot, began); },
        core_.describe("the buffer for gradients", unit));
    lock.lock();
    core_.mailbox.wait_for(awaited, {});
  }
  if (core_.slots.is_drained(slot)) return slot;
  core_.slots.give_back(slot);
  return kNoSlot;
}

void GradientReducer::flush_pending() {
  for (auto next = pending_.begin(); next != pending_.end();) {
    Round& waiting = **next;
    if (core_.unit(waiting.unit).policy.keeps_gradients || waiting.local || waiting.waits) {
      ++next;
      continue;
    }
    if (!may_publish(waiting)) return;
    if (waiting.slot == kNoSlot) {
      const int slot = core_.slots.find_free();
      if (slot == kNoSlot || !core_.slots.is_drained(slot)) return;
      core_.slots.take(slot);
      waiting.slot = slot;
    }
    std::unique_ptr<Round> round = std::move(*next);
    next = pending_.erase(next);
    --units_[static_cast<std::size_t>(round->unit)].pending;
    publish(std::move(round));
  }
}

GradientReducer::Buffer GradientReducer::buffer_at(std::uint64_t location, const FlatGroup& group) const {
  location &= ~kPartial;
  if (location == kLocal) {
    const Segment& segment = core_.model.unit_of(group).policy.keeps_gradients ? *core_.gradients : *local_;
    return {&segment, group.local_offset, group.gradient_dtype()};
  }
  const UnitLayout& unit = core_.model.unit_of(group);
  // What came late for a unit that keeps its gradients has been added up as wide as those.
  if ((location & kInOverflow) != 0 && unit.policy.keeps_gradients) {
    return {overflow_.get(), (location & ~kInOverflow) + group.local_offset - unit.local_offset,
            group.gradient_dtype()};
  }
  const Segment& segment = (location & kInOverflow) != 0 ? *overflow_ : core_.slots.segment();
  return {&segment, (location & ~kInOverflow) + group.slot_offset, group.reduce_dtype};
}

void GradientReducer::pack_held(Round& round, std::uint64_t location) {
  for (std::size_t i = 0; i < round.held.size(); ++i) {
    if (round.held[i].defined()) pack(round, i, location);
  }
}

void GradientReducer::pack(Round& round, std::size_t index, std::uint64_t location) {
  const ShardedParameter& p = core_.model.parameters[static_cast<std::size_t>(core_.unit(round.unit).trainable[index])];
  const FlatGroup& group = core_.model.group_of(p);
  const Buffer buffer = buffer_at(location, group);
  std::byte* target = buffer.local() + bytes_of(group.layout->parameters()[p.index_in_group].offset, buffer.dtype);
  at::Tensor& gradient = round.held[index];
  if (gradient.strides() == p.tensor.strides() && gradient.scalar_type() == to_scalar_type(buffer.dtype) &&
      !gradient.is_neg()) {
    std::memcpy(target, gradient.const_data_ptr(), gradient.nbytes());
  } else {
    const at::NoGradGuard no_grad;
    make_plain_view(target, p.tensor, buffer.dtype).copy_(gradient);
  }
  held_bytes_ -= gradient.nbytes();
  gradient.reset();
  round.packed[index] = true;
}

void GradientReducer::zero_missing(const Round& round, std::uint64_t location) const {
  const UnitLayout& unit = core_.unit(round.unit);
  const auto zero = [&](const FlatGroup& group, const ElementRange& range) {
    const Buffer buffer = buffer_at(location, group);
    std::memset(buffer.local() + bytes_of(range.offset, buffer.dtype), 0, bytes_of(range.numel, buffer.dtype));
  };
  for (std::size_t i = 0; i < round.packed.size(); ++i) {
    if (round.packed[i]) continue;
    const ShardedParameter& p = core_.model.parameters[static_cast<std::size_t>(unit.trainable[i])];
    const FlatGroup& group = core_.model.group_of(p);
    zero(group, group.layout->parameters()[p.index_in_group]);
  }
  for (const int index : unit.groups) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
    if (!group.trainable) continue;
    for (const ElementRange& gap : group.layout->gaps()) zero(group, gap);
  }
}

void GradientReducer::publish(std::unique_ptr<Round> round) {
  std::uint64_t location = kLocal;
  if (!round->local) {
    location = round->slot != kNoSlot ? core_.slots.location(round->slot) : overflow_offset_ | kInOverflow;
  }
  pack_held(*round, location);
  zero_missing(*round, location);
  begin_generation(*round);
  move_to(round->state, GradientState::kReducing, core_.unit_name(round->unit));
  if (round->local) {
    units_[static_cast<std::size_t>(round->unit)].local_is_published = true;
  } else if (round->slot != kNoSlot) {
    core_.slots.drain(round->slot, round->unit, round->generation);
  } else {
    overflow_offset_ += core_.model.largest_unit_bytes;
  }
  const bool partial = core_.update_in_backward &&
                       !std::all_of(round->packed.begin(), round->packed.end(), std::identity());
  core_.mailbox.publish(round->unit, round->generation, partial ? location | kPartial : location);
  enqueue_reduction(std::move(round));
}

void GradientReducer::begin_generation(Round& round) {
  UnitRounds& rounds = units_[static_cast<std::size_t>(round.unit)];
  round.accumulates = rounds.generation > rounds.first_generation;
  round.generation = ++rounds.generation;
  for (const int parameter : round.restarts) {
    if (round.accumulates) restarted_at_[static_cast<std::size_t>(parameter)] = round.generation;
  }
}

void GradientReducer::publish_absent(int unit, std::vector<int> restarts) {
  // The local buffer of such a unit holds the reduced share from now on.
  units_[static_cast<std::size_t>(unit)].local_is_published |= core_.unit(unit).policy.keeps_gradients;
  std::shared_ptr<Round> round = make_round(unit);
  round->restarts = std::move(restarts);
  begin_generation(*round);
  move_to(round->state, GradientState::kReducing, core_.unit_name(unit));
  core_.mailbox.publish(unit, round->generation, ReduceMailbox::kAbsent);
  enqueue_reduction(std::move(round));
}

void GradientReducer::enqueue_reduction(std::shared_ptr<Round> round) {
  const int unit = round->unit;
  const std::uint64_t generation = round->generation;
  if (core_.is_small(core_.unit(unit)) && !core_.update_in_backward && core_.mailbox.is_reducible(unit, generation)) {
    core_.stream.run_here([&] { reduce(round); }, [&] { return core_.describe("reduce", unit); });
    return;
  }
  core_.stream.enqueue({.ready = [this, unit, generation] { return core_.mailbox.is_reducible(unit, generation); },
                        .run = [this, round = std::move(round)] { reduce(round); },
                        .what = core_.describe("reduce", unit)});
}

void GradientReducer::forget() {
  for (UnitRounds& rounds : units_) {
    rounds.first_generation = rounds.generation;
    rounds.local_is_published = false;
  }
  std::fill(restarted_at_.begin(), restarted_at_.end(), 0);
  refusal_.clear();
  agreed_ = false;
  micro_batches_ = 0;
}

void GradientReducer::begin_no_sync() {
  if (local_ == nullptr) {
    local_ = core_.communicator().allocate(core_.model.local_bytes);
    core_.communicator().barrier();  // a peer's stream may read what is published next, so it must have its handle
  }
  const std::lock_guard lock(core_.mutex);
  ++no_sync_;
}

void GradientReducer::end_no_sync() {
  const std::lock_guard lock(core_.mutex);
  --no_sync_;
}

}  // namespace fsdp
