// System calls whose failure is an exception.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace fsdp {

// Of the system call that has just failed.
[[noreturn]] inline void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// Returns the result of a system call that says -1 for failure; throws std::system_error with `what` for that.
inline int check_call(int result, const std::string& what) {
  if (result < 0) throw_errno(what);
  return result;
}

}  // namespace fsdp
