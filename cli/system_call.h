// System calls of a program that starts others.
#pragma once

#include "comm/system_call.h"
#include "comm/unique_fd.h"

namespace fsdp {

struct Pipe {
  UniqueFd read_end, write_end;
};

// Both ends close on exec.
Pipe make_pipe();

}  // namespace fsdp
