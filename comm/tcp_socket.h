// TCP sockets by address: the name of an interface decides who can reach them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <netinet/in.h>

#include "comm/unique_fd.h"

namespace fsdp {

// An address and a port, of either IP.
struct TcpAddress {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  std::uint16_t port() const;
  void set_port(std::uint16_t port);
  bool is_loopback() const;
  std::string host() const;       // "10.0.0.7", "fe80::1"
  std::string to_string() const;  // "10.0.0.7:29500", "[fe80::1]:29500"
};

// What a host's name or address stands for. Throws InvalidArgument if for nothing.
std::vector<TcpAddress> resolve(const std::string& host, std::uint16_t port);

// None if the text is no address as host() writes them. Asks nobody.
std::optional<TcpAddress> to_numeric_address(const std::string& host, std::uint16_t port);

// Where other hosts reach this one: at the interface that is named, else at what the host's own name stands for, else at
// the first interface that is up and no loopback. Port 0. Throws InvalidArgument where there is none.
TcpAddress own_address(const std::string& interface);

// Listens at that address alone; port 0 is one that the system picks. Never blocks in accept. Throws InvalidArgument for
// a port that is in use, with its holder, or an address that is not of this machine.
UniqueFd listen_at(const TcpAddress& address);

// Nothing if nobody listens there, or no answer comes before `deadline`. From `own` if it is given (its port does not
// count). Throws std::system_error for any other fault.
std::optional<UniqueFd> connect_to(const TcpAddress& address, std::chrono::steady_clock::time_point deadline,
                                   const std::optional<TcpAddress>& own = std::nullopt);
// This host's address on the way there, for messages; empty where there is no way.
std::string source_towards(const TcpAddress& address);

// A connection that waits; none if there is none.
std::optional<UniqueFd> accept_from(const UniqueFd& listener);

TcpAddress local_address(const UniqueFd& socket);
TcpAddress peer_address(const UniqueFd& socket);

// All of it before `deadline`; false if the other end is closed or does not keep pace.
bool send_all(const UniqueFd& socket, std::span<const std::byte> bytes, std::chrono::steady_clock::time_point deadline);
bool receive_all(const UniqueFd& socket, std::span<std::byte> bytes, std::chrono::steady_clock::time_point deadline);

}  // namespace fsdp
