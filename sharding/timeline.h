// Follows a step while it runs: records it, recognises which plan it follows, and says what to do next. A step that
// leaves its plan runs on demand to its end: right, only slower. No locks of its own.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "sharding/step_plan.h"

namespace fsdp {

class Timeline {
 public:
  // With `whole_rounds` a plan ends a round only where it has all the gradients of its unit; else cut_round has to.
  Timeline(std::vector<PlannedUnit> units, int prefetch, bool whole_rounds = false);

  // An operator of a training pass touches these units (not empty). Returns the planned run that begins here; nullptr
  // where the present run goes on, or the step follows no plan. `began` tells whether a run began.
  struct Touched {
    bool began = false;
    const StepPlan::Run* run = nullptr;
  };
  Touched touch(std::span<const int> units);

  // The gradient of a unit's parameter is there.
  struct Arrived {
    bool ends_previous = false;  // the parameter came before in the open round: that one ends first, as it is
    bool ends = false;           // this gradient is the round's last
    bool packs = false;          // a buffer is to be open now
    int slot = kNoSlot;          // its planned slot; kNoSlot = any
    bool frees_unit = false;     // with `ends`
    bool last = false;           // with `ends`: the plan knows of no further round of the unit in this step
  };
  Arrived arrive(int unit, int parameter, bool local);

  bool started() const { return !record_.events.empty(); }
  // Ends a unit's open round; the step leaves its plan if that has the round end elsewhere.
  void cut_round(int unit);
  // The step is over, and no example.
  void abandon_step();
  // The step is over: a new pattern becomes a plan, kept beside a few older ones.
  void finish_step();
  // The pattern that was completed last; nullptr before the first step is over.
  const StepPlan* last_plan() const { return last_; }

 private:
  struct Pattern {
    StepPlan plan;
    const StepPlan* successor = nullptr;  // what followed it last time; patterns in turn are so predicted
  };
  struct OpenRound {
    std::vector<bool> arrived;
    int arrivals = 0;
    std::size_t index = 0;  // of the unit's rounds in this step
  };

  void leave_plan() { plan_ = nullptr; }
  const StepPlan::Round* planned_round(int unit) const;  // the unit's present one in the plan, or nullptr
  void choose_plan(std::span<const int> units);
  const StepPlan* expected() const;  // the plan that this step is likely to follow, or nullptr
  const StepPlan* plan_of_record();  // known or new
  void end_round(int unit);
  const Pattern* pattern_of(const StepPlan* plan) const;

  std::vector<PlannedUnit> units_;
  int prefetch_;
  bool whole_rounds_;
  std::deque<Pattern> patterns_;  // newest first; addresses stay, since only the ends move
  const StepPlan* plan_ = nullptr;
  const StepPlan* last_ = nullptr;
  StepRecord record_;
  bool recording_ = true;
  std::vector<int> active_;  // units of the run that goes on; empty once its round ended
  std::vector<int> last_run_;
  std::size_t next_run_ = 0;
  std::vector<OpenRound> rounds_;
};

}  // namespace fsdp
