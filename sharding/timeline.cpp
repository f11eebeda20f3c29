#include "sharding/timeline.h"

#include <algorithm>

namespace fsdp {
namespace {

constexpr std::size_t kMaxPatterns = 8;
constexpr std::size_t kMaxEvents = std::size_t{1} << 18;  // a step longer than this is not recorded and runs on demand

bool is_subset(std::span<const int> part, const std::vector<int>& whole) {
  return std::all_of(part.begin(), part.end(),
                     [&](int unit) { return std::find(whole.begin(), whole.end(), unit) != whole.end(); });
}

}  // namespace

Timeline::Timeline(std::vector<PlannedUnit> units, int prefetch, bool whole_rounds)
    : units_(std::move(units)), prefetch_(prefetch), whole_rounds_(whole_rounds), rounds_(units_.size()) {
  for (std::size_t unit = 0; unit < units_.size(); ++unit)
    rounds_[unit].arrived.resize(static_cast<std::size_t>(units_[unit].trainable));
}

Timeline::Touched Timeline::touch(std::span<const int> units) {
  if (!active_.empty() && is_subset(units, active_)) return {};
  if (!started()) choose_plan(units);
  const bool planned_next = plan_ != nullptr && next_run_ < plan_->runs.size() &&
                            std::equal(units.begin(), units.end(), plan_->runs[next_run_].units.begin(),
                                       plan_->runs[next_run_].units.end());
  // A unit whose round has ended may be touched once more without that being a run of the plan.
  if (plan_ != nullptr && !planned_next && active_.empty() && is_subset(units, last_run_)) return {};
  if (plan_ != nullptr && !planned_next) leave_plan();
  active_.assign(units.begin(), units.end());
  last_run_ = active_;
  if (recording_) {
    record_.events.push_back({StepEvent::Kind::kRun, static_cast<int>(record_.runs.size()), 0});
    record_.runs.push_back(active_);
    recording_ = record_.events.size() < kMaxEvents;
  }
  return {true, plan_ != nullptr ? &plan_->runs[next_run_++] : nullptr};
}

Timeline::Arrived Timeline::arrive(int unit, int parameter, bool local) {
  OpenRound& round = rounds_[static_cast<std::size_t>(unit)];
  Arrived result;
  if (round.arrived[static_cast<std::size_t>(parameter)]) {
    // The plan would have ended the round at its last arrival, so this step is another one.
    if (plan_ != nullptr) leave_plan();
    result.ends_previous = true;
    end_round(unit);
  }
  if (recording_) {
    record_.events.push_back({StepEvent::Kind::kArrival, unit, parameter, local});
    recording_ = record_.events.size() < kMaxEvents;
  }
  round.arrived[static_cast<std::size_t>(parameter)] = true;
  const int arrival = round.arrivals++;
  const StepPlan::Round* expected_round = planned_round(unit);
  if (plan_ != nullptr && (expected_round == nullptr || expected_round->local != local)) leave_plan();
  if (plan_ != nullptr) {
    const StepPlan::Round& planned = *expected_round;
    result.ends = arrival + 1 == planned.arrivals &&
                  (!whole_rounds_ || planned.arrivals == units_[static_cast<std::size_t>(unit)].trainable);
    // A slot that is free only after the unit's own parameters are gone is taken at the end.
    result.packs = result.ends || (arrival >= planned.opens_at && !(planned.opens_at + 1 == planned.arrivals));
    result.slot = planned.slot;
    result.frees_unit = planned.frees_unit;
    result.last = planned.last;
  } else {
    result.ends = round.arrivals == units_[static_cast<std::size_t>(unit)].trainable;
    result.packs = result.ends;
    result.frees_unit = true;
  }
  if (result.ends) end_round(unit);
  return result;
}

const StepPlan::Round* Timeline::planned_round(int unit) const {
  if (plan_ == nullptr) return nullptr;
  const auto& rounds = plan_->rounds[static_cast<std::size_t>(unit)];
  const std::size_t index = rounds_[static_cast<std::size_t>(unit)].index;
  return index < rounds.size() ? &rounds[index] : nullptr;
}

void Timeline::cut_round(int unit) {
  const StepPlan::Round* planned = planned_round(unit);
  if (planned == nullptr || planned->arrivals != rounds_[static_cast<std::size_t>(unit)].arrivals) leave_plan();
  end_round(unit);
}

void Timeline::finish_step() {
  if (started()) {
    const StepPlan* completed = recording_ ? plan_of_record() : nullptr;
    for (Pattern& pattern : patterns_) {
      if (&pattern.plan == last_) pattern.successor = completed;
    }
    last_ = completed;
  }
  abandon_step();
}

void Timeline::abandon_step() {
  plan_ = nullptr;
  record_ = {};
  recording_ = true;
  active_.clear();
  last_run_.clear();
  next_run_ = 0;
  for (OpenRound& round : rounds_) {
    round.arrivals = 0;
    round.index = 0;
    std::fill(round.arrived.begin(), round.arrived.end(), false);
  }
}

const StepPlan* Timeline::plan_of_record() {
  const auto known = std::find_if(patterns_.begin(), patterns_.end(),
                                  [&](const Pattern& p) { return p.plan.record == record_; });
  if (known != patterns_.end()) return &known->plan;
  if (patterns_.size() == kMaxPatterns) {
    const StepPlan* dropped = &patterns_.back().plan;
    for (Pattern& pattern : patterns_) {
      if (pattern.successor == dropped) pattern.successor = nullptr;
    }
    if (last_ == dropped) last_ = nullptr;
    patterns_.pop_back();
  }
  patterns_.push_front({build_step_plan(record_, units_, prefetch_), nullptr});
  return &patterns_.front().plan;
}

void Timeline::choose_plan(std::span<const int> units) {
  const auto begins_so = [&](const StepPlan* plan) {
    return plan != nullptr && !plan->runs.empty() &&
           std::equal(units.begin(), units.end(), plan->runs[0].units.begin(), plan->runs[0].units.end());
  };
  if (begins_so(expected())) {
    plan_ = expected();
    return;
  }
  const auto other = std::find_if(patterns_.begin(), patterns_.end(),
                                  [&](const Pattern& p) { return begins_so(&p.plan); });
  plan_ = other != patterns_.end() ? &other->plan : nullptr;
}

void Timeline::end_round(int unit) {
  OpenRound& round = rounds_[static_cast<std::size_t>(unit)];
  ++round.index;
  round.arrivals = 0;
  std::fill(round.arrived.begin(), round.arrived.end(), false);
  if (std::find(active_.begin(), active_.end(), unit) != active_.end()) active_.clear();
}

const StepPlan* Timeline::expected() const {
  const Pattern* before = pattern_of(last_);
  return before != nullptr && before->successor != nullptr ? before->successor : last_;
}

const Timeline::Pattern* Timeline::pattern_of(const StepPlan* plan) const {
  const auto found = std::find_if(patterns_.begin(), patterns_.end(),
                                  [&](const Pattern& p) { return &p.plan == plan; });
  return found != patterns_.end() ? &*found : nullptr;
}

}  // namespace fsdp
