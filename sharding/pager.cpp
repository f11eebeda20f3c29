#include "sharding/pager.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
Pager::Pager(EngineCore& core)
    : core_(core), units_(core.model.units.size()), evaluation_successor_(core.model.units.size()) {}

void Pager::acquire(std::unique_lock<std::mutex>& lock, std::span<const int> units) {
  core_.check();
  const bool training = core_.timeline.started() || in_backward() ||
                        (at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled());
  if (training) {
    const bool first_of_step = !core_.timeline.started();
    const Timeline::Touched touched = core_.timeline.touch(units);
    // What an evaluation left behind lies in other slots than the plan counts with.
    if (first_of_step) free_all_but({});
    if (touched.began) begin_training_run(touched.run, units);
  } else {
    touch_evaluation(units);
  }
  pin(lock, units);
}

void Pager::pin(std::unique_lock<std::mutex>& lock, std::span<const int> units) {
  std::size_t pinned = 0;
  try {
    for (const int unit : units) {
      Residency& residency = at(unit);
      // A resident unit that is to be dropped holds what a write left there; the shards decide.
      if (residency.state != ParameterState::kResident) residency.drop = false;
      if (residency.state == ParameterState::kSharded) start_gather(unit, kNoSlot);
      ++residency.pins;
      ++pinned;
    }
    ReduceMailbox::Drain awaited;
    core_.wait(lock, [&] {
      core_.mailbox.wait_for(awaited, find_awaited(units));
      return std::all_of(units.begin(), units.end(),
                         [&](int unit) { return at(unit).state == ParameterState::kResident; });
    });
  } catch (...) {
    for (const int unit : units.first(pinned)) --at(unit).pins;
    throw;
  }
}

// The first gather of these that waits for its slot.
ReduceMailbox::Drain Pager::find_awaited(std::span<const int> units) const {
  for (const int unit : units) {
    const Residency& residency = units_[static_cast<std::size_t>(unit)];
    if (residency.state == ParameterState::kGathering && residency.slot != kNoSlot &&
        !core_.slots.is_drained(residency.slot))
      return core_.slots.drain_of(residency.slot);
  }
  return {};
}

void Pager::release(std::span<const int> units, bool discard) {
  for (const int unit : units) {
    Residency& residency = at(unit);
    --residency.pins;
    residency.drop |= discard;
    if (residency.drop && residency.pins == 0) free(unit);
  }
}

void Pager::begin_training_run(const StepPlan::Run* run, std::span<const int> units) {
  if (run == nullptr) {
    free_all_but(units);
    return;
  }
  free_all_but(run->keep);
  for (const StepPlan::Gather& gather : run->gathers) {
    if (at(gather.unit).state == ParameterState::kSharded) start_gather(gather.unit, gather.slot);
  }
}

void Pager::touch_evaluation(std::span<const int> units) {
  const bool same_run = std::all_of(units.begin(), units.end(),
                                    [&](int unit) { return contains(evaluation_run_, unit); });
  if (same_run) return;
  if (!evaluation_run_.empty())
    evaluation_successor_[static_cast<std::size_t>(evaluation_run_.front())].assign(units.begin(), units.end());
  evaluation_run_.assign(units.begin(), units.end());
  std::vector<int> keep = evaluation_run_;
  if (core_.prefetch > 0) {
    for (const int unit : evaluation_successor_[static_cast<std::size_t>(units.front())]) keep.push_back(unit);
  }
  free_all_but(keep);
  for (const int unit : keep) {
    const bool asked_for = contains(units, unit);
    const bool has_room = core_.unit(unit).policy.keeps_parameters || core_.slots.find_free() != kNoSlot;
    if (at(unit).state == ParameterState::kSharded && (asked_for || has_room)) start_gather(unit, kNoSlot);
  }
}

void Pager::free_all_but(std::span<const int> keep) {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (!contains(keep, unit)) free_if_idle(unit);
  }
}

void Pager::free_if_idle(int unit) {
  if (keeping_ == 0 && !core_.unit(unit).policy.keeps_parameters) drop(unit);
}

void Pager::end_keeping() {
  --keeping_;
  free_all_but(evaluation_run_);
}

bool Pager::is_never_stale(int unit) const {
  return core_.unit(unit).policy.keeps_parameters && core_.unit(unit).mesh.shares == 1;
}

void Pager::drop(int unit) {
  Residency& residency = at(unit);
  if (residency.state == ParameterState::kSharded) return;
  if (residency.state == ParameterState::kResident && residency.pins == 0) {
    free(unit);
  } else if (residency.pins == 0) {
    residency.drop = true;
  }
}

void Pager::free_all(std::unique_lock<std::mutex>& lock) {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    if (at(unit).pins > 0) {
      throw InvalidArgument(
          fmt::format("an operator still uses unit {}; call step, save and resume outside of forward and backward",
                      core_.unit_name(unit)));
    }
    if (!is_never_stale(unit)) drop(unit);
  }
  core_.wait(lock, [&] {
    return std::none_of(units_.begin(), units_.end(), [](const Residency& r) {
      return r.state == ParameterState::kGathering || (r.state == ParameterState::kResident && r.drop);
    });
  });
  evaluation_run_.clear();
}

void Pager::start_gather(int unit, int slot) {
  Residency& residency = at(unit);
  if (core_.unit(unit).policy.keeps_parameters) {
    slot = kNoSlot;
  } else if (slot == kNoSlot || !core_.slots.is_free(slot)) {
    slot = core_.slots.find_free();
  }
  const bool runs_here = core_.is_small(core_.unit(unit)) && (slot == kNoSlot || core_.slots.is_drained(slot));
  if (!runs_here) {
    // Enqueued first: it may throw, and cannot run before this thread lets go of the mutex.
    const auto began = std::chrono::steady_clock::now();
    core_.stream.enqueue({.ready = [this, slot, began] { return slot == kNoSlot || core_.wait_is_over(slot, began); },
                          .run = [this, unit] { run_gather(unit); },
                          .what = core_.describe("gather", unit)});
  }
  move_to(residency.state, ParameterState::kGathering, core_.unit_name(unit));
  residency.drop = false;
  residency.slot = slot;
  if (slot != kNoSlot) core_.slots.take(slot);
  if (!runs_here) return;
  core_.stream.run_here(
      [&] {
        std::byte* data = find_room(unit);
        copy_shares(unit, data);
        finish_gather(unit, data);
      },
      [&] { return core_.describe("gather", unit); });
}

// Where a gather is to put the unit. A slot that peers still read is given up for an overflow buffer.
std::byte* Pager::find_room(int unit) {
  const UnitLayout& layout = core_.unit(unit);
  if (layout.policy.keeps_parameters) return core_.parameters->local().data() + layout.parameter_offset;
  Residency& residency = at(unit);
  if (residency.slot != kNoSlot && !core_.slots.is_drained(residency.slot)) {
    core_.slots.give_back(residency.slot);
    residency.slot = kNoSlot;
  }
  return residency.slot != kNoSlot ? core_.slots.data(residency.slot) : take_overflow(unit);
}

void Pager::run_gather(int unit) {
  std::byte* data = nullptr;
  {
    const std::lock_guard lock(core_.mutex);
    data = find_room(unit);
  }
  copy_shares(unit, data);
  const std::lock_guard lock(core_.mutex);
  finish_gather(unit, data);
}

void Pager::copy_shares(int unit, std::byte* data) {
  const UnitLayout& layout = core_.unit(unit);
  for (const int index : layout.groups) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
    core_.communicator().gather({.source = core_.parameters.get(),
                                 .offset = group.parameter_offset,
                                 .shard_bytes = group.shard_bytes(),
                                 .output = data + group.slot_offset,
                                 .label = layout.name,
                                 .first_rank = layout.mesh.rank_of(layout.mesh.replica(), 0),
                                 .ranks = layout.mesh.shares,
                                 .stride = group.parameter_stride});
  }
}

void Pager::finish_gather(int unit, std::byte* data) {
  const UnitLayout& layout = core_.unit(unit);
  for (const int index : layout.groups) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
    group.storage->point_at(data + group.slot_offset);
  }
  Residency& residency = at(unit);
  move_to(residency.state, ParameterState::kResident, layout.name);
  if (residency.drop && residency.pins == 0) free(unit);
}

void Pager::free(int unit) {
  Residency& residency = at(unit);
  move_to(residency.state, ParameterState::kSharded, core_.unit_name(unit));
  const UnitLayout& layout = core_.unit(unit);
  for (const int index : layout.groups) core_.model.groups[static_cast<std::size_t>(index)].storage->point_away();
  if (residency.slot != kNoSlot) core_.slots.give_back(residency.slot);
  if (residency.overflow != nullptr) overflow_bytes_ -= layout.bytes;
  residency.overflow.reset();
  residency.slot = kNoSlot;
  residency.drop = false;
}

std::byte* Pager::take_overflow(int unit) {
  const std::size_t bytes = core_.unit(unit).bytes;
  Residency& residency = at(unit);
  residency.overflow = std::make_unique_for_overwrite<std::byte[]>(bytes + kParameterAlignmentBytes);
  overflow_bytes_ += bytes;
  peak_overflow_bytes_ = std::max(peak_overflow_bytes_, overflow_bytes_);
  ++overflows_;
  const auto address = reinterpret_cast<std::uintptr_t>(residency.overflow.get());
  return residency.overflow.get() +
         (kParameterAlignmentBytes - address % kParameterAlignmentBytes) % kParameterAlignmentBytes;
}

std::size_t Pager::resident_bytes() const {
  std::size_t bytes = 0;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const UnitLayout& layout = core_.model.units[unit];
    if (units_[unit].state == ParameterState::kResident && !layout.policy.keeps_parameters) bytes += layout.bytes;
  }
  return bytes;
}

}  // namespace fsdp
