// Ranks that are threads of this process.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "comm/peer_communicator.h"

namespace fsdp {

// One communicator per rank, each for a thread of its own. REQUIRES 1 <= world_size <= kMaxWorldSize and timeout > 0.
std::vector<std::shared_ptr<PeerCommunicator>> make_thread_communicators(int world_size,
                                                                         std::chrono::milliseconds timeout);

}  // namespace fsdp
