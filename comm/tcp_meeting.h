// How ranks of any hosts find each other: all go to rank 0's door, which tells each where the others listen; then each
// pair of ranks makes two connections, of which the higher rank makes both.
//
//   rank r -> rank 0:  greeting (control lane), which stays as the link of the two
//   rank 0 -> rank r:  the table of all ranks, once all are there; else a refusal that says why
//   rank r -> rank s:  greetings (both lanes), for each s < r; rank 0's control lane is there already
//
// A rank listens at the address by which it reaches rank 0, and at no other.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/greeting.h"
#include "comm/link_memory.h"

namespace fsdp {

// Where rank 0 listens, and what it wants to see.
struct TcpSpot {
  std::vector<TcpAddress> addresses;
  JobToken token{};
};

struct TcpPlace {
  std::string name = {};  // of the place, for messages: "10.0.0.7:29500"
  int rank = 0, world_size = 1;
  std::chrono::milliseconds timeout{}, silence{};
  // Asked before each try, from rank 1 on; none where it is not known yet.
  std::function<std::optional<TcpSpot>()> find = {};
  std::optional<TcpAddress> own = {};  // that this rank goes out from and listens at; else the one that leads to rank 0
  bool may_be_stale = false;           // what is found may be an earlier job's: who answers wrongly there is not rank 0
  UniqueFd listener = {};              // rank 0's, with the token that it wants to see
  JobToken token{};
};

struct TcpMeeting {
  std::vector<PeerSockets> sockets;    // by rank, this one's own empty
  std::vector<PeerProcess> processes;  // by rank
  std::vector<std::string> hosts;      // by rank; equal for ranks of one host alone
};

// Throws InvalidArgument where ranks disagree on who they are, or the port is taken; CommunicationError, with the ranks
// that are missing, when one does not come in time or goes; std::system_error from the operating system.
TcpMeeting meet_over_tcp(TcpPlace place);

}  // namespace fsdp
