// How two ranks make sure of each other on a fresh TCP connection, before either believes a word of the other's.
//
//   guest: magic, nonce g                                   (one that connects)
//   host:  magic, nonce h, HMAC(token, "host" g h)          (one that listens)
//   guest: HMAC(token, "guest" h g greeting), greeting
//
// Neither mac is of use in another connection, and neither side learns the token.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "comm/frame.h"
#include "comm/job_token.h"
#include "comm/tcp_socket.h"

namespace fsdp {

struct Greeting {
  std::int32_t rank = 0, world_size = 0, pid = 0;
  Lane lane = Lane::kControl;
  std::uint16_t port = 0;  // where it listens, at the address that it comes from
  std::uint16_t unused = 0;
  char host[64] = {};  // its name
  char boot[40] = {};  // of its kernel: the same on one host alone
};

// Both return false where the other end is gone, has no such token, or does not answer before `deadline`.
bool greet(const UniqueFd& socket, const JobToken& token, const Greeting& greeting,
           std::chrono::steady_clock::time_point deadline);

struct Guest {
  UniqueFd socket;
  Greeting greeting;
};

// A listening socket and those who have come to it. Strangers are given 5 s and a bounded number of places.
class Door {
 public:
  Door(UniqueFd listener, const JobToken& token) : listener_(std::move(listener)), token_(token) {}

  TcpAddress address() const { return local_address(listener_); }
  // The next one that has proved itself; none if none has before `deadline`.
  std::optional<Guest> next(std::chrono::steady_clock::time_point deadline);
  int turned_away() const { return turned_away_; }

 private:
  struct Stranger {
    UniqueFd socket;
    std::chrono::steady_clock::time_point deadline;
    Nonce guest_nonce{}, host_nonce{};
    bool is_answered = false;
    std::vector<std::byte> heard = {};
  };
  enum class Verdict { kWaits, kIsGuest, kIsOut };

  void let_in();
  Verdict hear(Stranger& stranger, Greeting& greeting);
  bool answer(Stranger& stranger);

  UniqueFd listener_;
  JobToken token_;
  std::vector<Stranger> strangers_;
  int turned_away_ = 0;
};

}  // namespace fsdp
