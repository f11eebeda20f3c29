// Ranks on any hosts, over TCP.
#pragma once

#include <memory>

#include "comm/peer_communicator.h"
#include "comm/tcp_meeting.h"

namespace fsdp {

struct TcpGroup {
  std::shared_ptr<PeerCommunicator> communicator;
  int local_rank, local_world_size;  // among the ranks of the same host
};

// Returns once every rank is there. REQUIRES 1 <= world_size <= kMaxWorldSize. Throws as meet_over_tcp does, with
// CommunicationError in place of std::system_error.
TcpGroup make_tcp_communicator(TcpPlace place);

}  // namespace fsdp
