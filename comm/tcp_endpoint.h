// Where ranks of several hosts meet, read from what the caller and the launcher say. Pure.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "comm/launch_environment.h"

namespace fsdp {

struct TcpEndpoint {
  std::string host = {};  // of rank 0; empty: `file` tells
  std::uint16_t port = 0;
  std::filesystem::path file = {};
};

// init_method: "tcp://host:port", "tcp://[address]:port", "file:///path"; "" and "env://" are MASTER_ADDR and
// MASTER_PORT (or FSDP_MASTER_PORT, or the port after MASTER_PORT where torchrun's agent listens on that one itself),
// else in a step of srun its first host and a port that follows from the job. Throws InvalidArgument for anything else,
// and where nothing is said.
TcpEndpoint tcp_endpoint(const Variables& variables, const LaunchIdentity& self, const std::string& init_method);

// Of a list as Slurm writes it: "node[003-005,9],login" begins with node003. Throws InvalidArgument for what is none.
std::string first_host(std::string_view nodes);

}  // namespace fsdp
