// Where ranks tell each other which gradient buffers are full and which have been read. Lives in memory that all ranks can read.
//
// NOTE [Reduce mailbox]
// A unit's gradients are reduced in generations 1, 2, 3, ..., the same on every rank. Rank r publishes (unit, generation, location of its
// buffer); when all ranks have, each sums its own share from all the buffers and then counts the generation as consumed. A buffer may be
// overwritten once every rank has consumed it (drained). Nothing here blocks: waiting is Communicator::wait_until.
#pragma once

#include <cstdint>
#include <memory>

#include <fsdp/communicator.h>

namespace fsdp {

class ReduceMailbox {
 public:
  static constexpr std::uint64_t kAbsent = ~std::uint64_t{0};   // location of a rank that contributes zeros

  // Collective. At most `depth` generations of a unit may be undrained at once.
  ReduceMailbox(Communicator& communicator, int units, int depth);

  void publish(int unit, std::uint64_t generation, std::uint64_t location);
  bool is_published(int unit, std::uint64_t generation) const;   // by every rank
  std::uint64_t location(int rank, int unit, std::uint64_t generation) const;
  void consume(int unit, std::uint64_t generation);
  bool is_drained(int unit, std::uint64_t generation) const;     // by every rank

  // The fingerprint of the step plan that this rank follows; 0 = none.
  void set_plan(std::uint64_t fingerprint);
  // All ranks follow the same plan, so a wait for a peer's gradients ends.
  bool in_step() const;

  std::size_t bytes() const { return segment_->bytes(); }

 private:
  struct Entry;
  struct Board;
  const Entry& entry(int rank, int unit, std::uint64_t generation) const;
  Entry& own_entry(int unit, std::uint64_t generation);

  Communicator& communicator_;
  int units_, depth_;
  std::unique_ptr<Segment> segment_;
};

}  // namespace fsdp
