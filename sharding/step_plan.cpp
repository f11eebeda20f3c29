#include "sharding/step_plan.h"

#include <algorithm>
#include <set>

namespace fsdp {
namespace {

// Positions of a unit's arrivals in the record's events, cut into rounds: a parameter that comes again starts the next
// one.
std::vector<std::vector<std::size_t>> cut_rounds(const StepRecord& record, int unit) {
  std::vector<std::vector<std::size_t>> rounds;
  std::set<int> arrived;
  for (std::size_t position = 0; position < record.events.size(); ++position) {
    const StepEvent& event = record.events[position];
    if (event.kind != StepEvent::Kind::kArrival || event.index != unit) continue;
    if (rounds.empty() || !arrived.insert(event.parameter).second) {
      rounds.emplace_back();
      arrived = {event.parameter};
    }
    rounds.back().push_back(position);
  }
  return rounds;
}

// Walks the record once and gives out slots.
class Planner {
 public:
  Planner(const StepRecord& record, std::span<const PlannedUnit> units, int prefetch)
      : units_(units),
        prefetch_(prefetch),
        slots_(static_cast<std::size_t>(slots_for(units, prefetch))),
        slot_of_unit_(units.size(), kNoSlot),
        resident_(units.size()),
        round_(units.size()),
        arrival_(units.size()) {
    plan_.record = record;
    plan_.rounds.resize(units.size());
    for (const auto& run : record.runs) plan_.runs.push_back({.units = run, .keep = {}, .gathers = {}});
    plan_round_starts();
  }

  StepPlan build() {
    for (const StepEvent& event : plan_.record.events) {
      if (event.kind == StepEvent::Kind::kRun) {
        begin_run(static_cast<std::size_t>(event.index));
      } else {
        arrive(static_cast<std::size_t>(event.index));
      }
    }
    return std::move(plan_);
  }

 private:
  enum class Use { kFree, kBusy, kDraining };
  struct Slot {
    Use use = Use::kFree;
    int since = 0;  // order in which slots began to drain
  };

  bool is_local(const std::vector<std::size_t>& round) const { return plan_.record.events[round.front()].local; }

  void plan_round_starts() {
    std::vector<std::vector<std::vector<std::size_t>>> positions;
    std::vector<std::size_t> ends;
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      positions.push_back(cut_rounds(plan_.record, static_cast<int>(unit)));
      for (const auto& round : positions.back()) {
        if (!is_local(round)) ends.push_back(round.back());
      }
    }
    std::sort(ends.begin(), ends.end());
    for (std::size_t unit = 0; unit < positions.size(); ++unit) {
      for (const auto& round : positions[unit]) {
        const auto own_end = std::lower_bound(ends.begin(), ends.end(), round.back());
        const std::size_t last_other_end = own_end == ends.begin() ? 0 : *(own_end - 1) + 1;
        const auto first = std::lower_bound(round.begin(), round.end(), last_other_end);
        plan_.rounds[unit].push_back({.arrivals = static_cast<int>(round.size()),
                                      .opens_at = static_cast<int>(first - round.begin()),
                                      .local = is_local(round)});
      }
      if (!plan_.rounds[unit].empty()) plan_.rounds[unit].back().last = true;
    }
  }

  // The units of runs [from, from + count), in order and once each.
  std::vector<int> units_of_runs(std::size_t from, int count) const {
    std::vector<int> units;
    for (std::size_t i = from; i < std::min(from + static_cast<std::size_t>(count), plan_.runs.size()); ++i) {
      for (const int unit : plan_.runs[i].units) {
        if (!contains(units, unit)) units.push_back(unit);
      }
    }
    return units;
  }

  void begin_run(std::size_t index) {
    run_ = index;
    StepPlan::Run& run = plan_.runs[index];
    const std::vector<int> window = units_of_runs(index, prefetch_ + 1);
    for (std::size_t unit = 0; unit < resident_.size(); ++unit) {
      if (resident_[unit] && !contains(window, static_cast<int>(unit))) free_unit(unit);
    }
    for (const int unit : window) {
      const auto u = static_cast<std::size_t>(unit);
      if (!resident_[u]) {
        const bool ahead = !contains(run.units, unit), own_memory = units_[u].keeps_parameters;
        const int slot = own_memory ? kNoSlot : take_slot(/*prefer_draining=*/ahead);
        if (ahead && slot == kNoSlot && !own_memory) continue;
        resident_[u] = true;
        slot_of_unit_[u] = slot;
        run.gathers.push_back({unit, slot});
      }
      run.keep.push_back(unit);
    }
  }

  void arrive(std::size_t unit) {
    StepPlan::Round& round = plan_.rounds[unit][round_[unit]];
    const int arrival = arrival_[unit]++;
    const bool ends = arrival + 1 == round.arrivals;
    if (arrival == round.opens_at && !ends && !round.local) round.slot = take_slot(/*prefer_draining=*/false);
    if (!ends) return;
    // Where packing starts with the last gradient, or found no slot before, the unit's own slot may serve.
    round.frees_unit = resident_[unit] && !units_[unit].keeps_parameters &&
                       !contains(units_of_runs(run_ + 1, prefetch_), static_cast<int>(unit));
    const auto take = [&] {
      if (round.slot == kNoSlot && !round.local) round.slot = take_slot(/*prefer_draining=*/false);
    };
    take();
    if (round.frees_unit) free_unit(unit);
    take();
    if (round.slot != kNoSlot) slots_[static_cast<std::size_t>(round.slot)] = {Use::kDraining, ++drained_};
    ++round_[unit];
    arrival_[unit] = 0;
  }

  void free_unit(std::size_t unit) {
    if (units_[unit].keeps_parameters) return;
    resident_[unit] = false;
    if (slot_of_unit_[unit] != kNoSlot) slots_[static_cast<std::size_t>(slot_of_unit_[unit])].use = Use::kFree;
  }

  int take_slot(bool prefer_draining) {
    int free = kNoSlot, draining = kNoSlot;
    for (int i = 0; i < static_cast<int>(slots_.size()); ++i) {
      const Slot& slot = slots_[static_cast<std::size_t>(i)];
      if (slot.use == Use::kFree && free == kNoSlot) free = i;
      if (slot.use == Use::kDraining &&
          (draining == kNoSlot || slot.since < slots_[static_cast<std::size_t>(draining)].since))
        draining = i;
    }
    const int first = prefer_draining ? draining : free, second = prefer_draining ? free : draining;
    const int taken = first != kNoSlot ? first : second;
    if (taken != kNoSlot) slots_[static_cast<std::size_t>(taken)].use = Use::kBusy;
    return taken;
  }

  StepPlan plan_;
  std::span<const PlannedUnit> units_;
  int prefetch_;
  std::vector<Slot> slots_;
  std::vector<int> slot_of_unit_;
  std::vector<bool> resident_;
  std::vector<std::size_t> round_;
  std::vector<int> arrival_;
  std::size_t run_ = 0;
  int drained_ = 0;
};

}  // namespace

int slots_for(std::span<const PlannedUnit> units, int prefetch) {
  const auto any = [units](auto needs) { return std::any_of(units.begin(), units.end(), needs); };
  if (any([](const PlannedUnit& unit) { return !unit.keeps_parameters; })) return prefetch + 2;
  return any([](const PlannedUnit& unit) { return !unit.keeps_gradients && unit.trainable > 0; }) ? 2 : 0;
}

StepPlan build_step_plan(const StepRecord& record, std::span<const PlannedUnit> units, int prefetch) {
  return Planner(record, units, prefetch).build();
}

}  // namespace fsdp
