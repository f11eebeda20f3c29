// The settlement: the one point of a step that all ranks reach alike. They tell each other how many rounds of each unit
// there are and which parameters were used, and reduce what is left over on any rank.
#include <algorithm>
#include <bit>
#include <cstring>
#include <span>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/gradient_reducer.h"

namespace fsdp {

// What each rank tells the others at a settlement, followed by each unit's generation and each parameter's use.
struct GradientReducer::Announcement {
  char operation[32];
  std::int64_t step;
  std::uint64_t overflow_slots;
  std::uint64_t restarts;  // whether this rank has seen the user clear a gradient since the last step
  StepTerms terms;
  char failure[400];  // why this rank gives the step up, "" = it does not
};

namespace {

template <std::size_t size>
void put_text(char (&target)[size], std::string_view text) {
  std::memcpy(target, text.data(), std::min(text.size(), size - 1));
}

}  // namespace

std::vector<std::byte> GradientReducer::announce(const Announcement& announcement, const Usage& usage) const {
  std::vector<std::byte> bytes(sizeof(announcement) + units_.size() * sizeof(std::uint64_t) +
                               usage.used.size() * sizeof(bool));
  std::byte* next = bytes.data();
  const auto put = [&](const auto value) {
    std::memcpy(next, &value, sizeof(value));
    next += sizeof(value);
  };
  put(announcement);
  for (const UnitRounds& rounds : units_) put(rounds.generation + static_cast<std::uint64_t>(rounds.pending));
  for (const bool used : usage.used) put(used);
  return bytes;
}

GradientReducer::Agreement GradientReducer::agree(std::unique_lock<std::mutex>& lock, std::string_view operation,
                                                  const Usage& usage, const StepTerms& terms) {
  Announcement mine{{}, core_.step.load(), 0, has_restarts(usage), terms, {}};
  for (const auto& round : pending_) mine.overflow_slots += round->slot == kNoSlot && !round->local;
  put_text(mine.operation, operation);
  put_text(mine.failure, std::exchange(failure_, {}));
  const std::vector<std::byte> own = announce(mine, usage);
  std::vector<std::byte> all(own.size() * static_cast<std::size_t>(core_.communicator().world_size()));
  // Peers still in backward may wait for reductions of this rank's stream, which needs the mutex.
  lock.unlock();
  core_.communicator().all_gather(own, all);
  lock.lock();

  Agreement agreement;
  agreement.generations.resize(units_.size());
  agreement.used.resize(used_.size());
  agreement.restarted_at.resize(used_.size());
  const std::byte* next = all.data();
  const auto take = [&](auto value) {
    std::memcpy(&value, next, sizeof(value));
    next += sizeof(value);
    return value;
  };
  StepTerms first;
  for (int rank = 0; rank < core_.communicator().world_size(); ++rank) {
    const Announcement theirs = take(Announcement{});
    if (rank == 0) first = theirs.terms;
    if (agreement.refusal.empty()) agreement.refusal = describe_difference(first, theirs.terms, rank);
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
    agreement.has_restarts |= theirs.restarts != 0;
    for (std::uint64_t& generation : agreement.generations) generation = std::max(generation, take(generation));
    for (std::size_t p = 0; p < used_.size(); ++p) agreement.used[p] = take(false) || agreement.used[p];
  }
  return agreement;
}

std::string GradientReducer::describe_difference(const StepTerms& first, const StepTerms& other, int rank) const {
  constexpr std::pair<const char*, double StepTerms::*> kTerms[] = {
      {"lr", &StepTerms::lr},
      {"max_grad_norm", &StepTerms::max_grad_norm},
      {"max_grad_value", &StepTerms::max_grad_value},
      {"norm_type", &StepTerms::norm_type},
      {"on_non_finite", &StepTerms::on_non_finite},
      {"a loss scale of", &StepTerms::loss_scale},
      {"an average of decay", &StepTerms::ema_decay},
  };
  for (const auto& [name, term] : kTerms) {
    if (std::bit_cast<std::uint64_t>(first.*term) == std::bit_cast<std::uint64_t>(other.*term)) continue;
    return fmt::format("Optimizer::step {}: rank {} has {} {} where rank 0 has {} {}; {}", core_.step.load(), rank,
                       name, other.*term, name, first.*term,
                       core_.update_in_backward
                           ? "with update_in_backward weights may be updated with both: resume from "
                             "the newest checkpoint, the same on every rank"
                           : "nothing was updated; call it the same on every rank");
  }
  return "";
}

bool GradientReducer::has_restarts(const Usage& usage) const {
  const auto is_set = [](const auto& value) { return static_cast<bool>(value); };
  return std::any_of(usage.cleared.begin(), usage.cleared.end(), is_set) ||
         std::any_of(restarted_at_.begin(), restarted_at_.end(), is_set) ||
         std::any_of(pending_.begin(), pending_.end(), [](const auto& round) { return !round->restarts.empty(); });
}

// Where this rank has restarted each parameter, or will in a round that still waits.
std::vector<std::uint64_t> GradientReducer::restarts_here() const {
  std::vector<std::uint64_t> restarted_at = restarted_at_, generations;
  for (const UnitRounds& rounds : units_) generations.push_back(rounds.generation);
  for (const auto& round : pending_) {
    const auto unit = static_cast<std::size_t>(round->unit);
    const std::uint64_t generation = ++generations[unit];
    if (generation == units_[unit].first_generation + 1) continue;  // nothing has accumulated
    for (const int parameter : round->restarts) restarted_at[static_cast<std::size_t>(parameter)] = generation;
  }
  return restarted_at;
}

// NOTE [Cleared gradients]. A second exchange, of steps in which some rank has cleared.
void GradientReducer::agree_on_restarts(std::unique_lock<std::mutex>& lock, Agreement& agreement, const Usage& usage) {
  struct Told {
    std::uint64_t restarted_at, published;  // generation of the parameter's restart, and the unit's last so far
    std::uint64_t used, cleared;
  };
  const std::size_t parameters = used_.size();
  const auto ranks = static_cast<std::size_t>(core_.communicator().world_size());
  const std::vector<std::uint64_t> restarts = restarts_here();
  std::vector<Told> own, all(parameters * ranks);
  for (std::size_t p = 0; p < parameters; ++p) {
    const auto unit = static_cast<std::size_t>(core_.model.parameters[p].unit);
    own.push_back({restarts[p], units_[unit].generation, usage.used[p], usage.cleared[p]});
  }
  lock.unlock();
  core_.communicator().all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  lock.lock();
  for (std::size_t p = 0; p < parameters; ++p) {
    std::uint64_t& generation = agreement.restarted_at[p];
    for (std::size_t rank = 0; rank < ranks; ++rank)
      generation = std::max(generation, all[rank * parameters + p].restarted_at);
    if (!agreement.used[p] && !core_.update_in_backward) continue;
    const ShardedParameter& parameter = core_.model.parameters[p];
    const std::uint64_t before = units_[static_cast<std::size_t>(parameter.unit)].first_generation;
    for (std::size_t rank = 0; rank < ranks && refusal_.empty(); ++rank) {
      const Told& told = all[rank * parameters + p];
      const bool restarts_later = told.restarted_at == 0 && told.used == 0 && told.published < generation;
      const bool has_old = generation == 0 && told.cleared != 0 && told.published > before;
      if (!has_old && (told.restarted_at == generation || restarts_later)) continue;
      refusal_ = describe_misplaced(parameter, static_cast<int>(rank));
    }
  }
}

std::string GradientReducer::describe_misplaced(const ShardedParameter& parameter, int rank) const {
  const std::string what = fmt::format(
      "Module::zero_grad in the middle of step {} cleared the gradient of parameter {}", core_.step.load(),
      parameter.name);
  if (core_.update_in_backward) {
    return fmt::format(
        "{} on rank {}, but with update_in_backward the weights were updated with it in backward; resume "
        "from the newest checkpoint, and call zero_grad after the step only",
        what, rank);
  }
  return fmt::format(
      "{}, which rank {} had used otherwise than the others, so that old and new gradients are in one sum; "
      "call Optimizer::zero_grad on every rank to drop them, and in its place from now on",
      what, rank);
}

void GradientReducer::check_agreement() const {
  if (!refusal_.empty()) throw InvalidArgument(refusal_);
}

void GradientReducer::settle(std::unique_lock<std::mutex>& lock, std::string_view operation, const Usage& usage,
                             const StepTerms& terms) {
  std::vector<bool> waits(units_.size());  // for the generation at which ranks restart
  for (std::size_t p = 0; p < usage.cleared.size(); ++p) {
    if (!usage.cleared[p]) continue;
    waits[static_cast<std::size_t>(core_.model.parameters[p].unit)] = true;
    drop_gradient(static_cast<int>(p));
  }
  for (const auto& round : pending_) round->waits |= waits[static_cast<std::size_t>(round->unit)];
  for (std::size_t i = 0; i < units_.size(); ++i) {
    UnitRounds& rounds = units_[i];
    if (rounds.open != nullptr) rounds.open->waits = waits[i];
    end_open_round(lock, static_cast<int>(i));
    if (rounds.local == nullptr) continue;
    core_.timeline.cut_round(static_cast<int>(i));
    if (rounds.pending == 0 && !waits[i]) {
      publish(std::move(rounds.local));
    } else {
      hold(std::move(rounds.local));
    }
  }
  flush_pending();
  Agreement agreement = agree(lock, operation, usage, terms);
  if (agreement.failed_rank >= 0) fail_step(lock, std::move(agreement));
  refusal_ = agreement.refusal;
  if (agreement.has_restarts) agree_on_restarts(lock, agreement, usage);
  used_ = agreement.used;
  agreed_ = true;
  core_.changed.notify_all();
  reduce_rest(lock, agreement, operation);
  if (!core_.ordered_sums) return;
  // NOTE [Ordered sums]: all ranks go on at the same place.
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit)
    micro_batches_ = std::max(micro_batches_, rounds_of_step(unit));
}

void GradientReducer::meet(std::unique_lock<std::mutex>& lock, std::string_view operation, const Usage& usage) {
  Agreement agreement = agree(lock, operation, usage);
  if (agreement.failed_rank >= 0) fail_step(lock, std::move(agreement));
}

void GradientReducer::reduce_rest(std::unique_lock<std::mutex>& lock, const Agreement& agreement,
                                  std::string_view operation) {
  if (agreement.overflow_slots > 0) {
    overflow_ = core_.communicator().allocate(agreement.overflow_slots * core_.model.largest_unit_bytes);
    peak_overflow_bytes_ = std::max(peak_overflow_bytes_, overflow_->bytes());
    core_.communicator().barrier();  // a peer's stream may read what is published next, so it must have its handle
  }
  overflow_offset_ = 0;
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) publish_rest(lock, unit, agreement, operation);
  // All ranks are here and publish everything, so every reduction ends; a buffer may be reused once all have read it.
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    wait_settled(lock, unit, agreement.generations[static_cast<std::size_t>(unit)], operation);
  }
  overflow_.reset();
}

// Some rank gives the step up: what is not on its way is dropped, the rest is waited for, and every rank throws.
void GradientReducer::fail_step(std::unique_lock<std::mutex>& lock, Agreement agreement) {
  drop_unpublished();
  agreed_ = true;
  core_.changed.notify_all();
  agreement.overflow_slots = 0;
  reduce_rest(lock, agreement, "a step that is dropped");
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

// What of a parameter's gradient has not been published yet; what it has accumulated is for Round::restarts.
void GradientReducer::drop_gradient(int parameter) {
  const ShardedParameter& p = core_.model.parameters[static_cast<std::size_t>(parameter)];
  const auto index = static_cast<std::size_t>(p.trainable_index);
  const auto drop = [&](Round* round) {
    if (round == nullptr || round->unit != p.unit) return;
    if (round->held[index].defined()) held_bytes_ -= round->held[index].nbytes();
    round->held[index].reset();
    round->packed[index] = false;
  };
  const UnitRounds& rounds = units_[static_cast<std::size_t>(p.unit)];
  drop(rounds.open.get());
  drop(rounds.local.get());
  for (const auto& round : pending_) drop(round.get());
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

void GradientReducer::publish_rest(std::unique_lock<std::mutex>& lock, int unit, const Agreement& agreement,
                                   std::string_view operation) {
  UnitRounds& rounds = units_[static_cast<std::size_t>(unit)];
  const std::uint64_t last_generation = agreement.generations[static_cast<std::size_t>(unit)];
  const auto restarts_of_next = [&] {
    std::vector<int> restarts;
    for (const int index : core_.unit(unit).trainable) {
      const auto p = static_cast<std::size_t>(index);
      if (agreement.restarted_at[p] == rounds.generation + 1 && restarted_at_[p] == 0) restarts.push_back(index);
    }
    return restarts;
  };
  while (rounds.generation < last_generation) {
    // The mailbox holds so many undrained generations of a unit. Units go in the same order on every rank, so the wait
    // ends.
    const auto depth = static_cast<std::uint64_t>(core_.mailbox.depth());
    if (rounds.generation >= depth) wait_settled(lock, unit, rounds.generation + 1 - depth, operation);
    const auto next = std::find_if(pending_.begin(), pending_.end(),
                                   [&](const auto& round) { return round->unit == unit; });
    if (next == pending_.end()) {
      publish_absent(unit, restarts_of_next());
      continue;
    }
    std::unique_ptr<Round> round = std::move(*next);
    pending_.erase(next);
    --rounds.pending;
    const std::vector<int> restarts = restarts_of_next();
    round->restarts.insert(round->restarts.end(), restarts.begin(), restarts.end());
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
