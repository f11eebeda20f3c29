// The place where a rank of a job meets the others over TCP, with all that it needs to get in.
#pragma once

#include <chrono>
#include <string>

#include "comm/launch_environment.h"
#include "comm/tcp_meeting.h"

namespace fsdp {

// Rank 0 listens there when this returns, and has written the meeting file if there is one. Throws InvalidArgument for a
// place or a token that is not told or not usable, and CommunicationError for a file that cannot be written.
//
// NOTE [Stale meeting file] A file of an earlier start names a job or an attempt that is not this one, or an address where
// nobody listens, or somebody who does not have its token. Rank 0 replaces it; the others look at it again until they
// are let in.
TcpPlace tcp_place(const Variables& variables, const LaunchIdentity& self, const std::string& init_method,
                   std::chrono::milliseconds timeout, std::chrono::milliseconds silence);

}  // namespace fsdp
