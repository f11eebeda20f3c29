#include "sharding/reduce_mailbox.h"

#include <algorithm>

namespace fsdp {

// A rank's words: the waiting word, then `units` consumed and `units` complete words, then units * depth entries of a
// location and the generation that it is of, posted in this order. Zeros are the start state. A waiting word: 0 =
// running, ~0 = gone, else the unit and generation waited for.
namespace {
constexpr std::uint64_t kRunning = 0, kGone = ~std::uint64_t{0};
constexpr int kGenerationBits = 40;
constexpr int kWaitingWord = 0, kEntryWords = 2;
}  // namespace

ReduceMailbox::ReduceMailbox(Communicator& communicator, std::vector<Mesh> meshes, int depth)
    : communicator_(communicator),
      meshes_(std::move(meshes)),
      depth_(depth),
      board_(communicator.allocate_board(words())) {}

int ReduceMailbox::words() const { return 1 + units() * (2 + kEntryWords * depth_); }

int ReduceMailbox::consumed_word(int unit) const { return 1 + unit; }

int ReduceMailbox::complete_word(int unit) const { return 1 + units() + unit; }

int ReduceMailbox::entry_word(int unit, std::uint64_t generation) const {
  const int entry = unit * depth_ + static_cast<int>(generation % static_cast<std::uint64_t>(depth_));
  return 1 + 2 * units() + kEntryWords * entry;
}

std::uint64_t ReduceMailbox::published(int rank, int unit, std::uint64_t generation) const {
  return board_->word(rank, entry_word(unit, generation) + 1);
}

void ReduceMailbox::publish(int unit, std::uint64_t generation, std::uint64_t location) {
  const std::uint64_t words[kEntryWords] = {location, generation};
  board_->post(entry_word(unit, generation), words);
}

bool ReduceMailbox::is_reducible(int unit, std::uint64_t generation) const {
  if (!is_complete(unit, generation - 1)) return false;
  for (int rank = 0; rank < communicator_.world_size(); ++rank) {
    if (published(rank, unit, generation) != generation) return false;
  }
  return true;
}

std::uint64_t ReduceMailbox::location(int rank, int unit, std::uint64_t generation) const {
  return board_->word(rank, entry_word(unit, generation));
}

void ReduceMailbox::consume(int unit, std::uint64_t generation) { board_->post(consumed_word(unit), generation); }

bool ReduceMailbox::is_drained(int unit, std::uint64_t generation) const {
  for (int rank = 0; rank < communicator_.world_size(); ++rank) {
    if (board_->word(rank, consumed_word(unit)) < generation) return false;
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

void ReduceMailbox::set_word(std::uint64_t word) { board_->post(kWaitingWord, word); }

bool ReduceMailbox::is_summed(int unit, std::uint64_t generation) const {
  const Mesh& mesh = mesh_of(unit);
  for (int replica = 0; replica < mesh.replicas(); ++replica) {
    if (board_->word(mesh.rank_of(replica, mesh.share()), consumed_word(unit)) < generation) return false;
  }
  return true;
}

void ReduceMailbox::complete(int unit, std::uint64_t generation) { board_->post(complete_word(unit), generation); }

bool ReduceMailbox::is_complete(int unit, std::uint64_t generation) const {
  const Mesh& mesh = mesh_of(unit);
  for (int replica = 0; replica < mesh.replicas(); ++replica) {
    if (board_->word(mesh.rank_of(replica, mesh.share()), complete_word(unit)) < generation) return false;
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
  if (board_->word(other, kWaitingWord) == kGone) return board_->word(other, consumed_word(unit)) < generation;
  // A peer that has published further has published this one too.
  return published(other, unit, generation) < generation;
}

bool ReduceMailbox::is_deadlocked() const {
  const int ranks = communicator_.world_size();
  std::vector<std::uint64_t> words;
  for (int rank = 0; rank < ranks; ++rank) words.push_back(board_->word(rank, kWaitingWord));
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

}  // namespace fsdp
