#include "comm/tcp_communicator.h"

#include <system_error>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "comm/peer_communicator.h"

namespace fsdp {

TcpGroup make_tcp_communicator(TcpPlace place) {
  const std::string at = place.name;
  const int rank = place.rank, world_size = place.world_size;
  const auto timeout = place.timeout, silence = place.silence;
  try {
    TcpMeeting meeting = meet_over_tcp(std::move(place));
    TcpGroup group{.communicator = nullptr, .local_rank = 0, .local_world_size = 0};
    for (int peer = 0; peer < world_size; ++peer) {
      if (meeting.hosts[static_cast<std::size_t>(peer)] != meeting.hosts[static_cast<std::size_t>(rank)]) continue;
      group.local_rank += peer < rank ? 1 : 0;
      ++group.local_world_size;
    }
    auto memory = std::make_unique<LinkMemory>(
        std::move(meeting.sockets), LinkMemory::Options{rank, std::move(meeting.processes), timeout, silence});
    group.communicator = std::make_shared<PeerCommunicator>(std::move(memory),
                                                            PeerCommunicator::Options{"tcp", rank, timeout});
    return group;
  } catch (const std::system_error& error) {
    throw CommunicationError(
        fmt::format("rendezvous at {} failed on rank {} of {}: {}; check the network and the limit on open "
                    "files",
                    at, rank, world_size, error.what()),
        rank);
  }
}

}  // namespace fsdp
