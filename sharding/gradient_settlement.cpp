// The settlement: the one point of a step that all ranks reach alike. They tell each other how many rounds of each unit
// there are and which parameters were used, and reduce what is left over on any rank.
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/gradient_reducer.h"

namespace fsdp {

// What each rank tells the others at a settlement, followed by each unit's generation and each parameter's use.
struct GradientReducer::Announcement {
  char operation[32];
  std::int64_t step;
  std::uint64_t overflow_slots;
  char failure[400];  // why this rank gives the step up, "" = it does not
};

namespace {

template <std::size_t size>
void put_text(char (&target)[size], std::string_view text) {
  std::memcpy(target, text.data(), std::min(text.size(), size - 1));
}

}  // namespace

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
  Announcement mine{{}, core_.step.load(), 0, {}};
  for (const auto& round : pending_) mine.overflow_slots += round->slot == kNoSlot && !round->local;
  put_text(mine.operation, operation);
  put_text(mine.failure, std::exchange(failure_, {}));
  const std::vector<std::byte> own = announce(mine, used_here);
  std::vector<std::byte> all(own.size() * static_cast<std::size_t>(core_.communicator().world_size()));
  // Peers still in backward may wait for reductions of this rank's stream, which needs the mutex.
  lock.unlock();
  core_.communicator().all_gather(own, all);
  lock.lock();

  Agreement agreement{std::vector<std::uint64_t>(units_.size()), 0, {}, -1};
  std::fill(used_.begin(), used_.end(), false);
  const std::byte* next = all.data();
  const auto take = [&](auto value) {
    std::memcpy(&value, next, sizeof(value));
    next += sizeof(value);
    return value;
  };
  for (int rank = 0; rank < core_.communicator().world_size(); ++rank) {
    const Announcement theirs = take(Announcement{});
    if (*theirs.failure != '\0') {
      if (agreement.failed_rank < 0) agreement.failure = theirs.failure;
      if (agreement.failed_rank < 0) agreement.failed_rank = rank;
    } else if (*mine.failure == '\0' &&
               (std::strcmp(mine.operation, theirs.operation) != 0 || theirs.step != mine.step)) {
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

void GradientReducer::settle(std::unique_lock<std::mutex>& lock, std::string_view operation, Usage usage) {
  drop_cleared(usage.cleared);
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    UnitRounds& rounds = units_[static_cast<std::size_t>(unit)];
    end_open_round(lock, unit);
    if (rounds.local == nullptr) continue;
    core_.timeline.cut_round(unit);
    if (rounds.pending == 0) {
      publish(std::move(rounds.local));
    } else {
      ++rounds.pending;
      pending_.push_back(std::move(rounds.local));
    }
  }
  flush_pending();
  const Agreement agreement = agree(lock, operation, usage.used);
  if (agreement.failed_rank >= 0) fail_step(lock, agreement);
  agreed_ = true;
  core_.changed.notify_all();
  reduce_rest(lock, agreement, operation, usage.cleared);
}

void GradientReducer::meet(std::unique_lock<std::mutex>& lock, std::string_view operation, const Usage& usage) {
  const Agreement agreement = agree(lock, operation, usage.used);
  if (agreement.failed_rank >= 0) fail_step(lock, agreement);
}

void GradientReducer::reduce_rest(std::unique_lock<std::mutex>& lock, const Agreement& agreement,
                                  std::string_view operation, const std::vector<bool>& cleared) {
  if (agreement.overflow_slots > 0) {
    overflow_ = core_.communicator().allocate(agreement.overflow_slots * core_.model.largest_unit_bytes);
    peak_overflow_bytes_ = std::max(peak_overflow_bytes_, overflow_->bytes());
    core_.communicator().barrier();  // a peer's stream may read what is published next, so it must have its handle
  }
  overflow_offset_ = 0;
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit)
    publish_rest(lock, unit, agreement.generations[static_cast<std::size_t>(unit)], operation, cleared);
  // All ranks are here and publish everything, so every reduction ends; a buffer may be reused once all have read it.
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    wait_settled(lock, unit, agreement.generations[static_cast<std::size_t>(unit)], operation);
  }
  overflow_.reset();
}

// Some rank gives the step up: what is not on its way is dropped, the rest is waited for, and every rank throws.
void GradientReducer::fail_step(std::unique_lock<std::mutex>& lock, const Agreement& agreement) {
  drop_unpublished();
  agreed_ = true;
  core_.changed.notify_all();
  reduce_rest(lock, {agreement.generations, 0, {}, -1}, "a step that is dropped", std::vector<bool>(used_.size()));
  lock.unlock();
  core_.communicator().barrier();  // no rank begins the next step while another still learns of this one
  lock.lock();
  throw StepFailed(fmt::format("step {} was dropped on every rank: rank {} failed in it: {}{}", core_.step.load(),
                               agreement.failed_rank, agreement.failure,
                               core_.update_in_backward
                                   ? "; with update_in_backward some units may be updated already: resume from the "
                                     "newest checkpoint"
                                   : ""),
                   agreement.failed_rank);
}

// What the user has cleared since it came is not reduced, nor what had accumulated of it; see Round::restarts.
void GradientReducer::drop_cleared(std::vector<bool>& cleared) {
  for (std::size_t index = 0; index < cleared.size(); ++index) {
    if (!cleared[index]) continue;
    const ShardedParameter& p = core_.model.parameters[index];
    UnitRounds& rounds = units_[static_cast<std::size_t>(p.unit)];
    for (Round* round : {rounds.open.get(), rounds.local.get()}) {
      if (round == nullptr) continue;
      at::Tensor& held = round->held[static_cast<std::size_t>(p.trainable_index)];
      if (held.defined()) held_bytes_ -= held.nbytes();
      held.reset();
      round->packed[static_cast<std::size_t>(p.trainable_index)] = false;
      round->restarts.push_back(static_cast<int>(index));
      cleared[index] = false;
    }
  }
}

void GradientReducer::drop_unpublished() {
  for (UnitRounds& rounds : units_) {
    if (rounds.open != nullptr) pending_.push_back(std::move(rounds.open));
    rounds.local.reset();
    rounds.pending = 0;
  }
  for (const auto& round : pending_) {
    if (round->slot != kNoSlot) core_.slots.give_back(round->slot);
    for (const at::Tensor& held : round->held) {
      if (held.defined()) held_bytes_ -= held.nbytes();
    }
  }
  pending_.clear();
}

void GradientReducer::publish_rest(std::unique_lock<std::mutex>& lock, int unit, std::uint64_t last_generation,
                                   std::string_view operation, const std::vector<bool>& cleared) {
  UnitRounds& rounds = units_[static_cast<std::size_t>(unit)];
  std::vector<int> restarts;  // of the first generation that this rank has nothing for
  for (const int index : core_.unit(unit).trainable) {
    if (cleared[static_cast<std::size_t>(index)]) restarts.push_back(index);
  }
  while (rounds.generation < last_generation) {
    // The mailbox holds so many undrained generations of a unit. Units go in the same order on every rank, so the wait
    // ends.
    const auto depth = static_cast<std::uint64_t>(core_.mailbox.depth());
    if (rounds.generation >= depth) wait_settled(lock, unit, rounds.generation + 1 - depth, operation);
    const auto next = std::find_if(pending_.begin(), pending_.end(),
                                   [&](const auto& round) { return round->unit == unit; });
    if (next == pending_.end()) {
      publish_absent(unit, std::exchange(restarts, {}));
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
