#include "comm/tcp_communicator.h"

#include <system_error>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "comm/peer_communicator.h"

namespace fsdp {

std::shared_ptr<Communicator> make_tcp_communicator(TcpPlace place) {
  const std::string at = fmt::format("{}:{}", place.host, place.port);
  const int rank = place.rank, world_size = place.world_size;
  const auto timeout = place.timeout;
  try {
    TcpMeeting meeting = meet_over_tcp(std::move(place));
    auto memory = std::make_unique<LinkMemory>(std::move(meeting.sockets),
                                               LinkMemory::Options{rank, std::move(meeting.processes), timeout});
    return std::make_shared<PeerCommunicator>(std::move(memory), PeerCommunicator::Options{"tcp", rank, timeout});
  } catch (const std::system_error& error) {
    throw CommunicationError(
        fmt::format("rendezvous at {} failed on rank {} of {}: {}; check the network and the limit on open "
                    "files",
                    at, rank, world_size, error.what()),
        rank);
  }
}

}  // namespace fsdp
