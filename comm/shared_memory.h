// What thread and shm have in common: every rank sees all parts of an allocation in one mapping.
//
//   | rank 0 |pad| rank 1 |pad| ...     each part starts on a page, and its own rank touches it first
#pragma once

#include "comm/mapped_memory.h"
#include "comm/peer_memory.h"

namespace fsdp {

class SharedMemory : public PeerMemory {
 public:
  // Nothing has to be fetched here.
  std::unique_ptr<Fetch> fetch(std::span<const PeerCopy> copies) final;

 protected:
  // Of the mapping with a part of `bytes` for each rank. Throws std::system_error if there is no such number.
  static std::size_t mapped_bytes(std::size_t bytes, int world_size);
  static std::shared_ptr<const PeerRegion> mapped_region(std::shared_ptr<const MappedMemory> memory, std::size_t bytes,
                                                         int world_size);
  static PeerRegion staging_region(ControlBlock& control);
};

}  // namespace fsdp
