#include "sharding/reduce_mailbox.h"

#include <atomic>
#include <new>

namespace fsdp {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "the mailbox is shared between processes");

struct ReduceMailbox::Entry {
  std::atomic<std::uint64_t> generation;
  std::uint64_t location;
};

// Layout of each rank's part: plan word, then `units` consumed words, then units * depth entries. Zero bytes are the start state.
struct ReduceMailbox::Board {
  std::atomic<std::uint64_t>* words;
  Entry* entries;
  Board(std::span<std::byte> bytes, int units)
      : words(reinterpret_cast<std::atomic<std::uint64_t>*>(bytes.data())), entries(reinterpret_cast<Entry*>(words + 1 + units)) {}
  std::atomic<std::uint64_t>& plan() const { return words[0]; }
  std::atomic<std::uint64_t>& consumed(int unit) const { return words[1 + unit]; }
};

ReduceMailbox::ReduceMailbox(Communicator& communicator, int units, int depth)
    : communicator_(communicator), units_(units), depth_(depth),
      segment_(communicator.allocate(sizeof(std::uint64_t) * static_cast<std::size_t>(1 + units) +
                                     sizeof(Entry) * static_cast<std::size_t>(units * depth))) {}

void ReduceMailbox::publish(int unit, std::uint64_t generation, std::uint64_t location) {
  Entry& entry = own_entry(unit, generation);
  entry.location = location;
  entry.generation.store(generation, std::memory_order_release);
  communicator_.ring();
}

bool ReduceMailbox::is_published(int unit, std::uint64_t generation) const {
  for (int rank = 0; rank < communicator_.world_size(); ++rank) {
    if (entry(rank, unit, generation).generation.load(std::memory_order_acquire) != generation) return false;
  }
  return true;
}

std::uint64_t ReduceMailbox::location(int rank, int unit, std::uint64_t generation) const { return entry(rank, unit, generation).location; }

void ReduceMailbox::consume(int unit, std::uint64_t generation) {
  Board(segment_->local(), units_).consumed(unit).store(generation, std::memory_order_release);
  communicator_.ring();
}

bool ReduceMailbox::is_drained(int unit, std::uint64_t generation) const {
  for (int rank = 0; rank < communicator_.world_size(); ++rank) {
    if (Board(segment_->peer(rank), units_).consumed(unit).load(std::memory_order_acquire) < generation) return false;
  }
  return true;
}

void ReduceMailbox::set_plan(std::uint64_t fingerprint) {
  Board(segment_->local(), units_).plan().store(fingerprint, std::memory_order_release);
  communicator_.ring();
}

bool ReduceMailbox::in_step() const {
  const std::uint64_t own = Board(segment_->local(), units_).plan().load(std::memory_order_acquire);
  if (own == 0) return false;
  for (int rank = 0; rank < communicator_.world_size(); ++rank) {
    if (Board(segment_->peer(rank), units_).plan().load(std::memory_order_acquire) != own) return false;
  }
  return true;
}

const ReduceMailbox::Entry& ReduceMailbox::entry(int rank, int unit, std::uint64_t generation) const {
  return Board(segment_->peer(rank), units_).entries[unit * depth_ + static_cast<int>(generation % static_cast<std::uint64_t>(depth_))];
}

ReduceMailbox::Entry& ReduceMailbox::own_entry(int unit, std::uint64_t generation) {
  return Board(segment_->local(), units_).entries[unit * depth_ + static_cast<int>(generation % static_cast<std::uint64_t>(depth_))];
}

}  // namespace fsdp
