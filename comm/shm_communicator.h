// Ranks that are processes of one host and one user.
#pragma once

#include <memory>

#include "comm/peer_communicator.h"
#include "comm/rendezvous.h"

namespace fsdp {

// Returns once every rank is there. REQUIRES 1 <= world_size <= kMaxWorldSize. Throws as meet_at does, with
// CommunicationError in place of std::system_error.
std::shared_ptr<PeerCommunicator> make_shm_communicator(const MeetingPlace& place);

}  // namespace fsdp
