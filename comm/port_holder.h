// Which process listens on a TCP port of this host.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

// "pid 812 (train_gpt)"; "another process" where the system does not let us see whose it is; empty if nobody listens.
std::string holder_of_port(std::uint16_t port);

}  // namespace fsdp
