// What one training step did, and the plan that follows from it: when each unit is gathered and freed, when its
// gradients are packed and reduced, and in which slot of the arena. Integers only; immutable once built.
//
// NOTE [Step plan]
// A step is a list of runs (sets of units touched together, repeated touches collapsed) and arrivals (a parameter's
// gradient is there). With prefetch p, while run i lasts the units of runs i .. i+p are resident and nothing else.
// Gradients of a unit come in rounds: a round ends before a parameter would come twice, and is reduced at its last
// arrival. Packing begins once no other unit's round ends before this one does, so at most one buffer fills at a time.
// A buffer drains until all peers have read it. Units that keep their parameters are gathered into memory of their own,
// once; gradients that accumulate locally need no slot, and the last such round is where they are reduced.
//
// Backward of three units with prefetch 1 (3 slots; P parameters, F filling, D draining):
//
//   event      run 2    close 2   run 1           close 1   run 0    close 0
//   slot 0     P2       -         F1              D1        D1       -
//   slot 1     P1       P1        P1              -         F0       D0
//   slot 2     F2       D2        P0 (after D2)   P0        P0       -
//
// A gather ahead prefers a draining slot (it waits on the engine's own thread), packing prefers a free one (it would
// wait in backward). So prefetch + 2 slots are enough: prefetch + 1 units and one buffer, or prefetch units and two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace fsdp {

struct StepEvent {
  enum class Kind : std::uint8_t { kRun, kArrival };
  Kind kind = Kind::kRun;
  int index = 0;       // kRun: of the run; kArrival: of the unit
  int parameter = 0;   // kArrival: of the unit's trainable parameters
  bool local = false;  // kArrival: accumulates locally
  bool operator==(const StepEvent&) const = default;
};

struct StepRecord {
  std::vector<std::vector<int>> runs;  // unit indices in the order of their first touch
  std::vector<StepEvent> events;
  bool operator==(const StepRecord&) const = default;
};

inline bool contains(std::span<const int> units, int unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

// What a plan needs to know of a unit.
struct PlannedUnit {
  int trainable = 0;  // parameters
  bool keeps_parameters = false, keeps_gradients = false;
};

constexpr int kNoSlot = -1;  // of an overflow buffer, or of memory that is the unit's own

struct StepPlan {
  struct Gather {
    int unit = 0, slot = kNoSlot;
  };
  struct Run {
    std::vector<int> units;
    std::vector<int> keep;        // resident while the run lasts; all else is freed at its first touch
    std::vector<Gather> gathers;  // issued at its first touch, in this order
  };
  struct Round {
    int arrivals = 0;  // gradients in the round
    int opens_at = 0;  // arrival from which gradients are packed; those before are held
    int slot = kNoSlot;
    bool frees_unit = false;  // the unit's parameters are freed when the round ends
    bool local = false;       // accumulates locally
    bool last = false;        // of the step
  };
  std::vector<Run> runs;
  std::vector<std::vector<Round>> rounds;  // [unit][round]
  StepRecord record;
};

// REQUIRES prefetch >= 0 and unit indices below units.size().
StepPlan build_step_plan(const StepRecord& record, std::span<const PlannedUnit> units, int prefetch);

// As many as a plan may name: fewer where no unit's parameters need them, or no gradients.
int slots_for(std::span<const PlannedUnit> units, int prefetch);

}  // namespace fsdp
