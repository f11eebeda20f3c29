// Where ranks tell each other which gradient buffers are full and which have been read. Lives on a board.
//
// NOTE [Reduce mailbox]
// A unit's gradients are reduced in generations 1, 2, 3, ..., the same on every rank. Rank r publishes (unit,
// generation, location of its buffer); when all ranks have, each sums its own share from all the buffers and then
// counts the generation as consumed. A buffer may be overwritten once every rank has consumed it (drained). With
// replicas (NOTE [Mesh]) a rank sums its part of the share only; once all owners of the share have consumed, it copies
// their parts and counts the generation as complete. An owner goes on to the next generation when all have. Nothing
// here blocks: waiting is Communicator::wait_until.
//
// NOTE [Waiting for a slot]
// A rank whose next buffer is not drained says for which generation it waits; where several of its threads do, the word
// is of the one that began last and waits still. The wait ends by itself as long as the
// ranks that have not published it go on; ranks that run units in different orders may wait for each other, or in a
// collective. Each rank sees all the others' words, finds the circle, and takes an overflow buffer instead. So memory
// stays bounded where ranks do alike, and nothing hangs where they do not. A rank whose engine is gone reads nothing any
// more, so a generation that it has not consumed never drains. A rank that is blocked outside of the
// library is not seen; for that the wait has an end of its own (EngineCore::wait_is_over).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <fsdp/communicator.h>

#include "sharding/mesh.h"

namespace fsdp {

class ReduceMailbox {
 public:
  static constexpr std::uint64_t kAbsent = ~std::uint64_t{0};  // location of a rank that contributes zeros

  // Collective. One mesh for each unit, and at most `depth` generations of a unit undrained at once.
  ReduceMailbox(Communicator& communicator, std::vector<Mesh> meshes, int depth);

  void publish(int unit, std::uint64_t generation, std::uint64_t location);
  // By every rank, and all owners of this share are done with the generation before.
  bool is_reducible(int unit, std::uint64_t generation) const;
  std::uint64_t location(int rank, int unit, std::uint64_t generation) const;
  void consume(int unit, std::uint64_t generation);
  bool is_drained(int unit, std::uint64_t generation) const;  // consumed by every rank
  bool is_summed(int unit, std::uint64_t generation) const;   // consumed by every owner of this share
  void complete(int unit, std::uint64_t generation);
  bool is_settled(int unit, std::uint64_t generation) const;  // drained, and complete on every owner of this share

  // A thread of this rank waits for `next` to be drained, in place of `current`, which it replaces. Not by several at
  // once: under the engine's mutex.
  struct Drain {
    int unit = -1;  // -1 = nothing
    std::uint64_t generation = 0;
    bool operator==(const Drain&) const = default;
  };
  void wait_for(Drain& current, const Drain& next);
  void set_gone();  // the last word of this rank
  // This rank waits, and no rank that could end the wait will go on before it does.
  bool is_deadlocked() const;

  std::size_t bytes() const { return static_cast<std::size_t>(words()) * sizeof(std::uint64_t); }
  int depth() const { return depth_; }

 private:
  int words() const;
  int consumed_word(int unit) const;
  int complete_word(int unit) const;
  int entry_word(int unit, std::uint64_t generation) const;
  // The generation whose entry is where this one's would be.
  std::uint64_t published(int rank, int unit, std::uint64_t generation) const;
  void set_word(std::uint64_t word);
  bool waits_for(int rank, int other, std::uint64_t word) const;
  bool is_complete(int unit, std::uint64_t generation) const;
  int units() const { return static_cast<int>(meshes_.size()); }
  const Mesh& mesh_of(int unit) const { return meshes_[static_cast<std::size_t>(unit)]; }

  Communicator& communicator_;
  std::vector<Mesh> meshes_;
  int depth_;
  std::vector<Drain> waits_;  // of this rank's threads, the last is the word
  std::unique_ptr<Board> board_;
};

}  // namespace fsdp
