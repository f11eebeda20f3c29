// Keeps the right units resident: gathers them when or before they are touched, frees them after.
//
// NOTE [Residency]
// On a plan, a run's first touch frees what the plan does not keep and issues the plan's gathers into its slots. Off a
// plan only the touched units are gathered, and the others freed. A touch outside a training step (no-grad, inference
// mode) follows the order in which units succeeded each other last time; such passes have no end that could be seen,
// so their last units stay in the arena until the next touch or step.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "memory/torch_storage.h"
#include "sharding/engine_core.h"
#include "sharding/unit_state.h"

namespace fsdp {

class Pager {
 public:
  explicit Pager(EngineCore& core);

  // Makes the units of an operator resident and pins them. REQUIRES `lock` on core.mutex; it is let go while a gather
  // is awaited.
  void acquire(std::unique_lock<std::mutex>& lock, std::span<const int> units);
  // The same outside of any pass: no part of the timeline.
  void pin(std::unique_lock<std::mutex>& lock, std::span<const int> units);
  // Unpins; with `discard` the units are freed, since their slots no longer hold what the shards do.
  void release(std::span<const int> units, bool discard);

  // Frees a unit unless it is pinned or to be kept; a gather under way is dropped when it ends.
  void free_if_idle(int unit);
  // Frees all units whose bytes a change of the shards makes stale; waits for gathers under way. Throws InvalidArgument
  // if one is pinned.
  void free_all(std::unique_lock<std::mutex>& lock);

  // Between the two, units that are touched stay. May nest.
  void begin_keeping() { ++keeping_; }
  void end_keeping();

  std::size_t resident_bytes() const;
  std::size_t peak_overflow_bytes() const { return peak_overflow_bytes_; }
  std::int64_t overflows() const { return overflows_; }

 private:
  struct Residency {
    ParameterState state = ParameterState::kSharded;
    int pins = 0;
    int slot = kNoSlot;
    std::unique_ptr<std::byte[]> overflow;
    bool drop = false;  // free it as soon as the gather is over and nothing pins it
  };

  Residency& at(int unit) { return units_[static_cast<std::size_t>(unit)]; }
  void begin_training_run(const StepPlan::Run* run, std::span<const int> units);
  void touch_evaluation(std::span<const int> units);
  void free_all_but(std::span<const int> keep);
  void start_gather(int unit, int slot);
  ReduceMailbox::Drain find_awaited(std::span<const int> units) const;
  std::byte* find_room(int unit);
  void run_gather(int unit);  // on the engine's thread; its parts:
  void copy_shares(int unit, std::byte* data);
  void finish_gather(int unit, std::byte* data);
  void free(int unit);
  void drop(int unit);
  // The unit's own memory holds all of it whatever the shards become: they are its shards.
  bool is_never_stale(int unit) const;
  std::byte* take_overflow(int unit);

  EngineCore& core_;
  std::vector<Residency> units_;
  int keeping_ = 0;  // scopes open
  std::vector<int> evaluation_run_;
  std::vector<std::vector<int>> evaluation_successor_;  // by first unit of a run
  std::size_t overflow_bytes_ = 0, peak_overflow_bytes_ = 0;
  std::int64_t overflows_ = 0;
};

}  // namespace fsdp
