// System calls whose failure is an exception.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

#include "comm/unique_fd.h"

namespace fsdp {

// Returns the result of a system call that says -1 for failure; throws std::system_error with `what` for that.
inline int check_call(int result, const std::string& what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

struct Pipe {
  UniqueFd read_end, write_end;
};

// Both ends close on exec.
Pipe make_pipe();

}  // namespace fsdp
