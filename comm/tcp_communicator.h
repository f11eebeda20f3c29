// Ranks on any hosts, over TCP.
#pragma once

#include <memory>

#include <fsdp/communicator.h>

#include "comm/tcp_meeting.h"

namespace fsdp {

// Returns once every rank is there. REQUIRES 1 <= world_size <= kMaxWorldSize. Throws as meet_over_tcp does, with
// CommunicationError in place of std::system_error.
std::shared_ptr<Communicator> make_tcp_communicator(TcpPlace place);

}  // namespace fsdp
