// What the thread and shm backends differ in: where shared memory comes from, and how a peer's death is seen.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/control_block.h"
#include "comm/mapped_memory.h"

namespace fsdp {

class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  virtual ControlBlock& control() = 0;

  // A collective allocation in two steps; the communicator has the ranks meet after each. Both throw std::system_error.
  // Rank 0 makes `bytes` of zeroed memory and hands it out.
  virtual void offer(std::size_t bytes) = 0;
  // Every rank takes what rank 0 has handed out.
  virtual std::shared_ptr<const MappedMemory> collect(std::size_t bytes) = 0;

  // Ranks whose process has ended, whether or not they said that they leave. Any thread may call it.
  virtual std::vector<int> ended() const = 0;
};

}  // namespace fsdp
