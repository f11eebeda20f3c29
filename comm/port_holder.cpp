#include "comm/port_holder.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include <fmt/format.h>

namespace fsdp {
namespace {

// The inode of a socket that listens on the port, from a table of the kernel's: "sl local_address rem_address st ...", in
// which the port is hexadecimal and state 0A is LISTEN. Empty if there is none.
std::string listening_inode(const char* table, std::uint16_t port) {
  std::ifstream lines(table);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream fields(line);
    std::string number, local, remote, state, queues, timer, retransmits, user, timeout, inode;
    fields >> number >> local >> remote >> state >> queues >> timer >> retransmits >> user >> timeout >> inode;
    if (state == "0A" && local.ends_with(fmt::format(":{:04X}", port))) return inode;
  }
  return {};
}

bool holds_socket(const std::filesystem::path& process, const std::string& socket) {
  std::error_code error;
  for (std::filesystem::directory_iterator fd(process / "fd", error), end; !error && fd != end; fd.increment(error)) {
    std::error_code gone;
    if (std::filesystem::read_symlink(fd->path(), gone) == socket) return true;
  }
  return false;
}

}  // namespace

std::string holder_of_port(std::uint16_t port) {
  std::string inode = listening_inode("/proc/net/tcp", port);
  if (inode.empty()) inode = listening_inode("/proc/net/tcp6", port);
  if (inode.empty()) return {};
  const std::string socket = fmt::format("socket:[{}]", inode);
  std::error_code error;
  for (std::filesystem::directory_iterator process("/proc", error), end; !error && process != end;
       process.increment(error)) {
    const std::string pid = process->path().filename();
    if (pid.find_first_not_of("0123456789") != std::string::npos || !holds_socket(process->path(), socket)) continue;
    std::string name;
    std::getline(std::ifstream(process->path() / "comm"), name);
    return fmt::format("pid {} ({})", pid, name);
  }
  return "another process";
}

}  // namespace fsdp
