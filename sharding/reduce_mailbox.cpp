#include "sharding/reduce_mailbox.h"

#include <algorithm>
#include <atomic>

namespace fsdp {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "the mailbox is shared between processes");

struct ReduceMailbox::Entry {
  std::atomic<std::uint64_t> generation;
  std::uint64_t location;
};

// A waiting word: 0 = running, ~0 = gone, else the unit and generation waited for.
namespace {
constexpr std::uint64_t kRunning = 0, kGone = ~std::uint64_t{0};
constexpr int kGenerationBits = 40;
}  // namespace

// Layout of each rank's part: waiting word, then `units` consumed and `units` complete words, then units * depth
// entries. Zero bytes are the start state.
struct ReduceMailbox::Board {
  std::atomic<std::uint64_t>* words;
  int unit_count;
  Entry* entries;
  Board(std::span<std::byte> bytes, int units)
      : words(reinterpret_cast<std::atomic<std::uint64_t>*>(bytes.data())),
        unit_count(units),
        entries(reinterpret_cast<Entry*>(words + words_for(units))) {}
  static int words_for(int units) { return 1 + 2 * units; }
  std::atomic<std::uint64_t>& waiting() const { return words[0]; }
  std::atomic<std::uint64_t>& consumed(int unit) const { return words[1 + unit]; }
  std::atomic<std::uint64_t>& complete(int unit) const { return words[1 + unit_count + unit]; }
};

ReduceMailbox::ReduceMailbox(Communicator& communicator, std::vector<Mesh> meshes, int depth)
    : communicator_(communicator),
      meshes_(std::move(meshes)),
      depth_(depth),
      segment_(communicator.allocate(sizeof(std::uint64_t) * static_cast<std::size_t>(Board::words_for(units())) +
                                     sizeof(Entry) * static_cast<std::size_t>(units() * depth))) {}

void ReduceMailbox::publish(int unit, std::uint64_t generation, std::uint64_t location) {
  Entry& entry = own_entry(unit, generation);
  entry.location = location;
  entry.generation.store(generation, std::memory_order_release);
  communicator_.ring();
}

bool ReduceMailbox::is_reducible(int unit, std::uint64_t generation) const {
  if (!is_complete(unit, generation - 1)) return false;
  for (int rank = 0; rank < communicator_.world_size(); ++rank) {
    if (entry(rank, unit, generation).generation.load(std::memory_order_acquire) != generation) return false;
  }
  return true;
}

std::uint64_t ReduceMailbox::location(int rank, int unit, std::uint64_t generation) const {
  return entry(rank, unit, generation).location;
}

void ReduceMailbox::consume(int unit, std::uint64_t generation) {
  Board(segment_->local(), units()).consumed(unit).store(generation, std::memory_order_release);
  communicator_.ring();
}

bool ReduceMailbox::is_drained(int unit, std::uint64_t generation) const {
  for (int rank = 0; rank < communicator_.world_size(); ++rank) {
    if (Board(segment_->peer(rank), units()).consumed(unit).load(std::memory_order_acquire) < generation) return false;
  }
  return true;
}

void ReduceMailbox::wait_for(Drain& current, const Drain& next) {
  if (current == next) return;
  if (current.unit >= 0) waits_.erase(std::find(waits_.begin(), waits_.end(), current));
  if (next.unit >= 0) waits_.push_back(next);
  current = next;
  set_word(waits_.empty()
               ? kRunning
               : static_cast<std::uint64_t>(waits_.back().unit + 1) << kGenerationBits | waits_.back().generation);
}

void ReduceMailbox::set_gone() { set_word(kGone); }

void ReduceMailbox::set_word(std::uint64_t word) {
  Board(segment_->local(), units()).waiting().store(word, std::memory_order_release);
  if (word != kRunning) communicator_.ring();
}

bool ReduceMailbox::is_summed(int unit, std::uint64_t generation) const {
  const Mesh& mesh = mesh_of(unit);
  for (int replica = 0; replica < mesh.replicas(); ++replica) {
    const Board board(segment_->peer(mesh.rank_of(replica, mesh.share())), units());
    if (board.consumed(unit).load(std::memory_order_acquire) < generation) return false;
  }
  return true;
}

void ReduceMailbox::complete(int unit, std::uint64_t generation) {
  Board(segment_->local(), units()).complete(unit).store(generation, std::memory_order_release);
  communicator_.ring();
}

bool ReduceMailbox::is_complete(int unit, std::uint64_t generation) const {
  const Mesh& mesh = mesh_of(unit);
  for (int replica = 0; replica < mesh.replicas(); ++replica) {
    const Board board(segment_->peer(mesh.rank_of(replica, mesh.share())), units());
    if (board.complete(unit).load(std::memory_order_acquire) < generation) return false;
  }
  return true;
}

bool ReduceMailbox::is_settled(int unit, std::uint64_t generation) const {
  return is_drained(unit, generation) && is_complete(unit, generation);
}

// Whether `rank`, whose waiting word is `word`, cannot go on before `other` does.
bool ReduceMailbox::waits_for(int rank, int other, std::uint64_t word) const {
  if (rank == other) return false;
  if (communicator_.awaits(rank, other)) return true;
  if (word == kRunning) return false;
  const int unit = static_cast<int>(word >> kGenerationBits) - 1;
  const std::uint64_t generation = word & ((std::uint64_t{1} << kGenerationBits) - 1);
  const Board board(segment_->peer(other), units());
  if (board.waiting().load(std::memory_order_acquire) == kGone)
    return board.consumed(unit).load(std::memory_order_acquire) < generation;
  // A peer that has published further has published this one too.
  return entry(other, unit, generation).generation.load(std::memory_order_acquire) < generation;
}

bool ReduceMailbox::is_deadlocked() const {
  const int ranks = communicator_.world_size();
  std::vector<std::uint64_t> words;
  for (int rank = 0; rank < ranks; ++rank)
    words.push_back(Board(segment_->peer(rank), units()).waiting().load(std::memory_order_acquire));
  // Ranks that go on: those that wait for none, then those that wait only for such.
  std::vector<bool> goes_on(static_cast<std::size_t>(ranks));
  for (bool changed = true; changed;) {
    changed = false;
    for (int rank = 0; rank < ranks; ++rank) {
      if (goes_on[static_cast<std::size_t>(rank)] || words[static_cast<std::size_t>(rank)] == kGone) continue;
      bool blocked = false;
      for (int other = 0; other < ranks; ++other) {
        blocked |= !goes_on[static_cast<std::size_t>(other)] &&
                   waits_for(rank, other, words[static_cast<std::size_t>(rank)]);
      }
      if (!blocked) goes_on[static_cast<std::size_t>(rank)] = changed = true;
    }
  }
  return !goes_on[static_cast<std::size_t>(communicator_.rank())];
}

const ReduceMailbox::Entry& ReduceMailbox::entry(int rank, int unit, std::uint64_t generation) const {
  return Board(segment_->peer(rank), units())
      .entries[unit * depth_ + static_cast<int>(generation % static_cast<std::uint64_t>(depth_))];
}

ReduceMailbox::Entry& ReduceMailbox::own_entry(int unit, std::uint64_t generation) {
  return Board(segment_->local(), units())
      .entries[unit * depth_ + static_cast<int>(generation % static_cast<std::uint64_t>(depth_))];
}

}  // namespace fsdp
