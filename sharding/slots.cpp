#include "sharding/slots.h"

namespace fsdp {

Slots::Slots(Communicator& communicator, const ReduceMailbox& mailbox, int count, std::size_t slot_bytes)
    : mailbox_(mailbox),
      slot_bytes_(slot_bytes),
      slots_(static_cast<std::size_t>(count)),
      segment_(communicator.allocate(static_cast<std::size_t>(count) * slot_bytes)) {}

bool Slots::is_drained(int slot) const {
  const Drain& drain = drain_of(slot);
  return drain.unit < 0 || mailbox_.is_drained(drain.unit, drain.generation);
}

int Slots::find_free() const {
  int draining = kNoSlot;
  for (int slot = 0; slot < static_cast<int>(slots_.size()); ++slot) {
    if (!is_free(slot)) continue;
    if (is_drained(slot)) return slot;
    if (draining == kNoSlot) draining = slot;
  }
  return draining;
}

}  // namespace fsdp
