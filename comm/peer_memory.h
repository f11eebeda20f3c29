// What the backends differ in: how ranks see each other's memory and words, and how a peer's death is seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/control_block.h"

namespace fsdp {

// One allocation as this rank sees it: a part per rank.
struct PeerRegion {
  std::uint64_t id = 0;  // the same on every rank
  std::size_t bytes = 0;
  std::vector<std::byte*> parts = {};      // by rank; null where a peer's bytes have to be fetched
  std::shared_ptr<const void> owner = {};  // of the parts
};

// Bytes of a peer that are to be copied here.
struct PeerCopy {
  const PeerRegion* region = nullptr;
  int rank = 0;
  std::size_t offset = 0;
  std::span<std::byte> target = {};
};

class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  virtual ControlBlock& control() = 0;
  // The staging areas, two halves of each rank: NOTE [Two halves].
  virtual const PeerRegion& staging() = 0;

  // A collective allocation in two steps; the communicator has the ranks meet after each. Both throw std::system_error.
  // Rank 0 makes zeroed memory of `bytes` for each rank and hands it out.
  virtual void offer(std::size_t bytes) = 0;
  // Every rank takes what rank 0 has handed out.
  virtual std::shared_ptr<const PeerRegion> collect(std::size_t bytes) = 0;
  // The same in one step for a board, of which every rank can read all parts in place.
  virtual std::shared_ptr<const PeerRegion> collect_board(std::size_t bytes) { return collect(bytes); }

  // Copies under way. Destruction takes back what has not come: nothing writes to the targets any more.
  class Fetch {
   public:
    virtual ~Fetch() = default;
    virtual bool is_done() const = 0;  // all of it has come, or cannot come any more
    virtual int lost() const = 0;      // a rank that is gone and had something of it; -1 = none
    virtual int awaited() const = 0;   // a rank that something is still to come from; -1 = none
  };
  // Never waits; the doorbell rings when it is done. REQUIRES copies of parts that are null here.
  virtual std::unique_ptr<Fetch> fetch(std::span<const PeerCopy> copies) = 0;

  // Tells the peers what this rank has just written in its part of the control block or of a board. Nothing to do where
  // they see the same memory.
  virtual void announce_arrival(std::uint64_t) {}
  virtual void announce_words(const PeerRegion&, int /*index*/, std::span<const std::uint64_t>) {}
  virtual void announce_abort() noexcept {}
  virtual void announce_leave() noexcept {}
  // This rank has come out of a collective and reads nothing of it any more.
  virtual void end_collective() noexcept {}

  // This rank goes as if its process was killed. Throws InvalidArgument where it cannot alone.
  virtual void die() = 0;

  // Ranks that have ended, whether or not they said that they leave. Any thread may call it.
  virtual std::vector<int> ended() const = 0;
};

}  // namespace fsdp
