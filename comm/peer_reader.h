// Peers' bytes, read where they lie if this rank has them in place, else fetched.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "comm/peer_group.h"

namespace fsdp {

// Elements of one input of a reduction: bytes of a peer, or memory of this rank. Neither = none.
struct PeerInput {
  const PeerRegion* region = nullptr;
  int rank = 0;
  std::size_t offset = 0;
  const std::byte* local = nullptr;
};

// Any thread; borrows both.
class PeerReader {
 public:
  PeerReader(PeerMemory& memory, PeerGroup& group) : memory_(memory), group_(group) {}

  // Returns when all is there. A part that is its own target stays as it is.
  void copy(std::span<const PeerCopy> copies, const Activity& activity);

  // Calls body(first element, elements, a pointer per input; null = none) for pieces that together are the whole: one
  // piece where all inputs are in place; else the next one is fetched while body works on this one.
  using Body = std::function<void(std::int64_t, std::int64_t, std::span<const std::byte* const>)>;
  void for_each_piece(std::span<const PeerInput> inputs, std::int64_t numel, std::size_t element_bytes,
                      const Activity& activity, const Body& body);

 private:
  PeerMemory& memory_;
  PeerGroup& group_;
};

}  // namespace fsdp
