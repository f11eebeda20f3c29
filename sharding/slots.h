// The arena: equal slots in memory that all ranks can read, allocated once. A slot holds the gathered parameters of
// one unit, or the full gradients of one until every rank has read them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <fsdp/communicator.h>

#include "sharding/reduce_mailbox.h"
#include "sharding/step_plan.h"

namespace fsdp {

class Slots {
 public:
  // Collective.
  Slots(Communicator& communicator, const ReduceMailbox& mailbox, int count, std::size_t slot_bytes);

  std::byte* data(int slot) const { return segment_->local().data() + location(slot); }
  // Bytes from the start of the segment, the same on every rank.
  std::uint64_t location(int slot) const { return static_cast<std::uint64_t>(slot) * slot_bytes_; }
  const Segment& segment() const { return *segment_; }
  std::size_t bytes() const { return slots_.size() * slot_bytes_; }
  int count() const { return static_cast<int>(slots_.size()); }

  bool is_free(int slot) const { return !slots_[static_cast<std::size_t>(slot)].busy; }
  // No rank still reads what the slot held last.
  bool is_drained(int slot) const;
  // A free slot, a drained one if there is one; or kNoSlot.
  int find_free() const;
  // What a slot that is not drained waits for.
  using Drain = ReduceMailbox::Drain;
  const Drain& drain_of(int slot) const { return slots_[static_cast<std::size_t>(slot)].drain; }
  void take(int slot) { slots_[static_cast<std::size_t>(slot)].busy = true; }
  void give_back(int slot) { slots_[static_cast<std::size_t>(slot)].busy = false; }
  // Given back, but readable by peers until all have consumed this generation.
  void drain(int slot, int unit, std::uint64_t generation) {
    slots_[static_cast<std::size_t>(slot)] = {false, {unit, generation}};
  }

 private:
  struct Slot {
    bool busy = false;
    Drain drain{};
  };

  const ReduceMailbox& mailbox_;
  std::size_t slot_bytes_;
  std::vector<Slot> slots_;
  std::unique_ptr<Segment> segment_;
};

}  // namespace fsdp
