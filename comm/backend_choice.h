// Which backend the ranks talk over, and why. Pure.
#pragma once

#include <string>

#include "comm/launch_environment.h"

namespace fsdp {

struct BackendChoice {
  std::string backend;  // "shm" or "tcp"
  std::string reason;   // "all 4 ranks are on this host (from torchrun)"
};

// `asked` by the program; FSDP_BACKEND, which `fsdp run --backend` sets, comes second, and only where it asks for "auto".
// `is_met_elsewhere`: the ranks meet at a place that the program names, which other hosts may reach. Throws
// InvalidArgument for a backend that is not known or cannot be.
BackendChoice choose_backend(const std::string& asked, const Variables& variables, const LaunchIdentity& self,
                             bool is_met_elsewhere);

}  // namespace fsdp
