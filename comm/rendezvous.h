// How the processes of one host find each other: rank 0 listens on a Unix socket, the others come, and all of them get
// one control block and a handle on every process.
//
//   rank r: hello (world size, rank, pid) + pidfd of itself  -> rank 0
//   rank 0: welcome + pidfds of ranks 0..W-1 + control memfd -> every rank, once all are there; else a refusal that says why
#pragma once

#include <chrono>
#include <filesystem>
#include <vector>

#include "comm/control_block.h"
#include "comm/mapped_memory.h"
#include "comm/unique_fd.h"

namespace fsdp {

struct MeetingPlace {
  std::filesystem::path socket;   // not looked at when world_size is 1
  bool create_directory = false;  // make the socket's folder if it is not there
  int rank = 0, world_size = 1;
  std::chrono::milliseconds timeout{};  // positive
};

// What a rank holds once all have met.
struct Meeting {
  std::vector<UniqueFd> links;      // rank 0: a socket to each rank (its own unused); others: [0] leads to rank 0
  std::vector<UniqueFd> processes;  // pidfds, readable once the process has ended
  MappedMemory control_memory;
  ControlBlock* control = nullptr;  // lives in control_memory
};

// Throws InvalidArgument where ranks disagree on who they are, CommunicationError when a rank does not come in time
// (names which) or dies on the way, and std::system_error from the operating system.
Meeting meet_at(const MeetingPlace& place);

}  // namespace fsdp
