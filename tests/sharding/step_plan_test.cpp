#include "sharding/step_plan.h"

#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>
#include <rapidcheck.h>

namespace fsdp {
namespace {

void run(StepRecord& record, std::vector<int> units) {
  record.events.push_back({StepEvent::Kind::kRun, static_cast<int>(record.runs.size()), 0});
  record.runs.push_back(std::move(units));
}

void arrive(StepRecord& record, int unit, int parameter = 0) {
  record.events.push_back({StepEvent::Kind::kArrival, unit, parameter});
}

std::vector<PlannedUnit> paged(int units) { return std::vector<PlannedUnit>(static_cast<std::size_t>(units)); }

// Forward 0 .. n-1, backward n-1 .. 0 with two gradients each: a chain as any deep model is one.
StepRecord chain(int units) {
  StepRecord record;
  for (int unit = 0; unit < units; ++unit) run(record, {unit});
  for (int unit = units - 1; unit >= 0; --unit) {
    if (unit != units - 1) run(record, {unit});
    arrive(record, unit, 0);
    arrive(record, unit, 1);
  }
  return record;
}

// Replays a plan against the rules of NOTE [Step plan] and returns a fault, or "".
std::string check(const StepPlan& plan, const std::vector<PlannedUnit>& units, int prefetch) {
  std::vector<int> slot_of(units.size(), kNoSlot);
  std::vector<bool> resident(units.size());
  std::map<int, int> occupant;  // slot -> unit whose parameters it holds
  std::vector<std::size_t> round(units.size());
  std::vector<int> arrivals(units.size());
  std::map<int, int> filling;  // slot -> unit whose gradients it takes
  const auto free = [&](std::size_t unit) {
    if (units[unit].keeps_parameters) return;
    resident[unit] = false;
    occupant.erase(slot_of[unit]);
  };
  for (const StepEvent& event : plan.record.events) {
    if (event.kind == StepEvent::Kind::kRun) {
      const StepPlan::Run& run = plan.runs[static_cast<std::size_t>(event.index)];
      for (std::size_t unit = 0; unit < resident.size(); ++unit) {
        if (resident[unit] && std::find(run.keep.begin(), run.keep.end(), static_cast<int>(unit)) == run.keep.end())
          free(unit);
      }
      for (const StepPlan::Gather& gather : run.gathers) {
        const auto unit = static_cast<std::size_t>(gather.unit);
        if (resident[unit]) return "gathers a resident unit";
        if (gather.slot != kNoSlot && (occupant.count(gather.slot) > 0 || filling.count(gather.slot) > 0))
          return "gathers into a slot in use";
        if (units[unit].keeps_parameters && gather.slot != kNoSlot) return "gives a slot to what has its own memory";
        if (gather.slot >= slots_for(units, prefetch)) return "names a slot that is not there";
        resident[unit] = true;
        slot_of[unit] = gather.slot;
        if (gather.slot != kNoSlot) occupant[gather.slot] = gather.unit;
      }
      for (const int unit : run.units) {
        if (!resident[static_cast<std::size_t>(unit)]) return "begins a run without its unit";
      }
      std::ptrdiff_t in_slots = 0;
      for (std::size_t unit = 0; unit < resident.size(); ++unit)
        in_slots += resident[unit] && !units[unit].keeps_parameters;
      if (in_slots > std::max<std::ptrdiff_t>(prefetch + 1, static_cast<std::ptrdiff_t>(run.units.size()))) {
        return "keeps more units than the window";
      }
      continue;
    }
    const auto unit = static_cast<std::size_t>(event.index);
    const StepPlan::Round& planned = plan.rounds[unit][round[unit]];
    const int arrival = arrivals[unit]++;
    const bool ends = arrival + 1 == planned.arrivals;
    if (ends && planned.frees_unit) free(unit);
    const bool opens = planned.opens_at + 1 == planned.arrivals ? ends : arrival == planned.opens_at;
    if (planned.local && planned.slot != kNoSlot) return "gives a slot to local gradients";
    if (planned.last != (round[unit] + 1 == plan.rounds[unit].size())) return "mistakes the last round";
    if (opens && planned.slot != kNoSlot) {
      if (occupant.count(planned.slot) > 0 || !filling.empty()) return "packs into a slot in use";
      filling[planned.slot] = event.index;
    }
    if (ends) {
      filling.clear();
      arrivals[unit] = 0;
      ++round[unit];
    }
  }
  return "";
}

TEST(StepPlanTest, GathersOneUnitAheadAndAlternatesThreeSlots) {
  const StepPlan plan = build_step_plan(chain(3), paged(3), 1);
  ASSERT_EQ(plan.runs.size(), 5U);
  EXPECT_EQ(plan.runs[0].keep, (std::vector<int>{0, 1}));
  ASSERT_EQ(plan.runs[0].gathers.size(), 2U);
  EXPECT_EQ(plan.runs[1].keep, (std::vector<int>{1, 2}));
  EXPECT_EQ(plan.runs[1].gathers.size(), 1U);
  // Run 2 is the last of forward and the first of backward; unit 1 follows it.
  EXPECT_EQ(plan.runs[2].keep, (std::vector<int>{2, 1}));
  EXPECT_EQ(plan.runs[2].gathers.size(), 0U);
  std::set<int> slots;
  for (const auto& rounds : plan.rounds) {
    ASSERT_EQ(rounds.size(), 1U);
    EXPECT_EQ(rounds[0].arrivals, 2);
    EXPECT_EQ(rounds[0].opens_at, 0);
    EXPECT_TRUE(rounds[0].frees_unit);
    EXPECT_NE(rounds[0].slot, kNoSlot);
  }
  EXPECT_EQ(check(plan, paged(3), 1), "");
}

// docs/training_step.md.
TEST(StepPlanTest, MatchesTheDrawingOfOneStep) {
  const StepPlan plan = build_step_plan(chain(4), paged(4), 1);
  const std::vector<std::vector<std::pair<int, int>>> gathers{{{0, 0}, {1, 1}}, {{2, 0}}, {{3, 1}}, {},
                                                              {{1, 2}},         {{0, 1}}, {}};
  ASSERT_EQ(plan.runs.size(), gathers.size());
  for (std::size_t run = 0; run < gathers.size(); ++run) {
    std::vector<std::pair<int, int>> planned;
    for (const auto& gather : plan.runs[run].gathers) planned.emplace_back(gather.unit, gather.slot);
    EXPECT_EQ(planned, gathers[run]) << "run " << run;
  }
  const std::vector<int> slots{2, 0, 1, 2};
  for (std::size_t unit = 0; unit < slots.size(); ++unit)
    EXPECT_EQ(plan.rounds[unit].at(0).slot, slots[unit]) << "unit " << unit;
}

TEST(StepPlanTest, NeedsNoOverflowForChainsOfAnyLengthAndPrefetch) {
  for (int units = 1; units <= 12; ++units) {
    for (int prefetch = 0; prefetch <= 4; ++prefetch) {
      const StepPlan plan = build_step_plan(chain(units), paged(units), prefetch);
      EXPECT_EQ(check(plan, paged(units), prefetch), "") << units << " units, prefetch " << prefetch;
      for (const auto& run : plan.runs) {
        for (const auto& gather : run.gathers) EXPECT_NE(gather.slot, kNoSlot);
      }
      for (const auto& rounds : plan.rounds) EXPECT_NE(rounds.at(0).slot, kNoSlot);
    }
  }
}

TEST(StepPlanTest, HoldsEarlyGradientsUntilNoOtherRoundEndsBefore) {
  // A root whose norm's gradient comes first and whose embedding's comes last.
  StepRecord record;
  run(record, {0});
  run(record, {1});
  run(record, {0});
  arrive(record, 0, 0);
  run(record, {1});
  arrive(record, 1, 0);
  arrive(record, 1, 1);
  arrive(record, 0, 1);
  arrive(record, 0, 2);
  const StepPlan plan = build_step_plan(record, paged(2), 1);
  EXPECT_EQ(plan.rounds[0].at(0).arrivals, 3);
  EXPECT_EQ(plan.rounds[0].at(0).opens_at, 1);
  EXPECT_EQ(plan.rounds[1].at(0).opens_at, 0);
  EXPECT_EQ(check(plan, paged(2), 1), "");
}

TEST(StepPlanTest, StartsARoundWhereAParameterComesAgain) {
  StepRecord record = chain(2);
  const StepRecord again = chain(2);
  for (const StepEvent& event : again.events) {
    StepEvent copy = event;
    if (copy.kind == StepEvent::Kind::kRun) copy.index += static_cast<int>(again.runs.size());
    record.events.push_back(copy);
  }
  record.runs.insert(record.runs.end(), again.runs.begin(), again.runs.end());
  const StepPlan plan = build_step_plan(record, paged(2), 1);
  for (const auto& rounds : plan.rounds) EXPECT_EQ(rounds.size(), 2U);
  EXPECT_EQ(check(plan, paged(2), 1), "");
}

TEST(StepPlanTest, GathersAUnitThatKeepsItsParametersOnceAndGivesItNoSlot) {
  const std::vector<PlannedUnit> kept(3, {.trainable = 2, .keeps_parameters = true});
  const StepPlan plan = build_step_plan(chain(3), kept, 1);
  EXPECT_EQ(check(plan, kept, 1), "");
  std::vector<int> gathered;
  for (const auto& run : plan.runs) {
    for (const auto& gather : run.gathers) gathered.push_back(gather.unit);
  }
  EXPECT_EQ(gathered, (std::vector<int>{0, 1, 2}));
  for (const auto& rounds : plan.rounds) {
    EXPECT_NE(rounds.at(0).slot, kNoSlot);
    EXPECT_FALSE(rounds.at(0).frees_unit);
  }
}

TEST(StepPlanTest, NeedsNoMoreSlotsThanSomethingUses) {
  const PlannedUnit full{.trainable = 1}, kept{.trainable = 1, .keeps_parameters = true},
      replicated{.trainable = 1, .keeps_parameters = true, .keeps_gradients = true}, frozen{.keeps_parameters = true};
  for (const int prefetch : {0, 1, 3}) {
    EXPECT_EQ(slots_for(std::vector{replicated, kept, full}, prefetch), prefetch + 2);
    EXPECT_EQ(slots_for(std::vector{replicated, kept}, prefetch), 2);
    EXPECT_EQ(slots_for(std::vector{replicated, frozen}, prefetch), 0);
  }
}

TEST(StepPlanTest, TakesAnOverflowForAnOperatorThatNeedsMoreUnitsThanFit) {
  StepRecord record;
  run(record, {0, 1, 2, 3, 4});
  const StepPlan plan = build_step_plan(record, paged(5), 1);
  const auto overflows = std::count_if(plan.runs[0].gathers.begin(), plan.runs[0].gathers.end(),
                                       [](const auto& g) { return g.slot == kNoSlot; });
  EXPECT_EQ(overflows, 5 - slots_for(paged(5), 1));
  EXPECT_EQ(check(plan, paged(5), 1), "");
}

TEST(StepPlanTest, KeepsItsRulesForAnyRecord) {
  const bool holds = rc::check("any order of runs and arrivals", [] {
    std::vector<PlannedUnit> planned;
    for (int i = *rc::gen::inRange(1, 6); i > 0; --i) {
      const bool keeps_parameters = *rc::gen::arbitrary<bool>();
      planned.push_back({.trainable = 3,
                         .keeps_parameters = keeps_parameters,
                         .keeps_gradients = keeps_parameters && *rc::gen::arbitrary<bool>()});
    }
    const int units = static_cast<int>(planned.size()), prefetch = *rc::gen::inRange(0, 4);
    StepRecord record;
    for (int i = *rc::gen::inRange(1, 60); i > 0; --i) {
      const int unit = *rc::gen::inRange(0, units);
      if (*rc::gen::arbitrary<bool>() || record.runs.empty()) {
        if (record.runs.empty() || record.runs.back() != std::vector<int>{unit}) run(record, {unit});
      } else {
        arrive(record, unit, *rc::gen::inRange(0, 3));
        record.events.back().local = planned[static_cast<std::size_t>(unit)].keeps_gradients;
      }
    }
    const std::string fault = check(build_step_plan(record, planned, prefetch), planned, prefetch);
    if (!fault.empty()) RC_LOG(fault);
    RC_ASSERT(fault.empty());
  });
  EXPECT_TRUE(holds);
}

}  // namespace
}  // namespace fsdp
