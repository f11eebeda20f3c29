#include "comm/shared_memory.h"

#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>

namespace fsdp {

std::unique_ptr<PeerMemory::Fetch> SharedMemory::fetch(std::span<const PeerCopy>) {
  throw std::logic_error("every part of shared memory is in place");
}

std::size_t SharedMemory::mapped_bytes(std::size_t bytes, int world_size) {
  const auto ranks = static_cast<std::size_t>(world_size);
  if (bytes > std::numeric_limits<std::size_t>::max() / ranks / 2)
    throw std::system_error(ENOMEM, std::generic_category(), "allocate");
  return round_up_to_page(bytes) * ranks;
}

std::shared_ptr<const PeerRegion> SharedMemory::mapped_region(std::shared_ptr<const MappedMemory> memory,
                                                              std::size_t bytes, int world_size) {
  const auto region = std::make_shared<PeerRegion>();
  region->bytes = bytes;
  for (int rank = 0; rank < world_size; ++rank)
    region->parts.push_back(memory->span().data() + static_cast<std::size_t>(rank) * round_up_to_page(bytes));
  region->owner = std::move(memory);
  return region;
}

PeerRegion SharedMemory::staging_region(ControlBlock& control) {
  PeerRegion region{.bytes = 2 * kStagingBytes};
  for (int rank = 0; rank < control.world_size(); ++rank) region.parts.push_back(control.staging(rank));
  return region;
}

}  // namespace fsdp
