// Any bytes from a peer, in either lane: the rank goes on or gives the peer up, and what it holds stays whole.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>

#include <sys/socket.h>

#include "comm/link_memory.h"
#include "comm/tcp_socket.h"

namespace {

using namespace std::chrono_literals;

struct Pair {
  fsdp::UniqueFd ours, theirs;
};

Pair make_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) __builtin_trap();
  return {fsdp::UniqueFd(ends[0]), fsdp::UniqueFd(ends[1])};
}

// Reads what the rank sends, so that it never has to keep it.
void drain(const fsdp::UniqueFd& socket) {
  std::byte bytes[4096];
  while (::recv(socket.get(), bytes, sizeof(bytes), 0) > 0) {
  }
}

}  // namespace

// The first byte picks the lane.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  Pair control = make_pair(), bulk = make_pair();
  std::vector<fsdp::PeerSockets> sockets(2);
  sockets[1] = {std::move(control.ours), std::move(bulk.ours)};
  {
    fsdp::LinkMemory memory(std::move(sockets),
                            {.rank = 0, .processes = {{1, ""}, {2, ""}}, .timeout = 100ms, .silence = 0ms});
    const auto segment = memory.collect(4096);
    const auto board = memory.collect_board(64);
    std::byte target[64] = {};
    const fsdp::PeerCopy copy{segment.get(), 1, 0, target};
    const auto fetch = memory.fetch({&copy, 1});
    const fsdp::UniqueFd& lane = data[0] % 2 == 0 ? control.theirs : bulk.theirs;
    fsdp::send_all(lane, std::as_bytes(std::span(data + 1, bytes - 1)), std::chrono::steady_clock::now() + 100ms);
    drain(control.theirs);
    drain(bulk.theirs);
    ::shutdown(control.theirs.get(), SHUT_WR);
    ::shutdown(bulk.theirs.get(), SHUT_WR);
    // All of it has been heard once its end has been.
    const auto end = std::chrono::steady_clock::now() + 1s;
    while (memory.ended().empty() && std::chrono::steady_clock::now() < end) {
      drain(control.theirs);
      drain(bulk.theirs);
      std::this_thread::yield();
    }
    if (memory.ended().empty()) __builtin_trap();
    control.theirs = fsdp::UniqueFd();
    bulk.theirs = fsdp::UniqueFd();
  }
  return 0;
}
