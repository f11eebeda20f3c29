#include "comm/tcp_socket.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <fsdp/error.h>

#include "comm/port_holder.h"
#include "comm/system_call.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

const sockaddr* raw(const TcpAddress& address) { return reinterpret_cast<const sockaddr*>(&address.storage); }

UniqueFd make_socket(const TcpAddress& address) {
  UniqueFd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw_errno("socket");
  return socket;
}

// Small messages go out at once.
UniqueFd without_delay(UniqueFd socket) {
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return socket;
}

// False once the deadline is over.
bool wait_for(const UniqueFd& socket, short events, Clock::time_point deadline) {
  pollfd fd{socket.get(), events, 0};
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return ::poll(&fd, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000))) > 0;
}

bool nobody_is_there(int error) {
  return error == ECONNREFUSED || error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == ECONNRESET || error == EHOSTDOWN;
}

template <class Call>
TcpAddress address_by(const UniqueFd& socket, const Call& call) {
  TcpAddress address;
  address.bytes = sizeof(address.storage);
  if (call(socket.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.bytes) != 0)
    throw_errno("getsockname");
  return address;
}

// getaddrinfo's error, or 0.
int look_up(const std::string& host, std::uint16_t port, int flags, std::vector<TcpAddress>& addresses) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), fmt::format("{}", port).c_str(), &hints, &found);
  if (error != 0) return error;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    TcpAddress& address = addresses.emplace_back();
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.bytes = entry->ai_addrlen;
  }
  return 0;
}

// Moves all bytes with `call`, which is given those that are left.
template <class Bytes, class Call>
bool move_all(const UniqueFd& socket, Bytes bytes, short events, Clock::time_point deadline, const Call& call) {
  while (!bytes.empty()) {
    const ssize_t moved = call(bytes);
    if (moved > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(moved));
    } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
      return false;
    } else if (!wait_for(socket, events, deadline) && Clock::now() >= deadline) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::uint16_t TcpAddress::port() const {
  return ntohs(storage.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

void TcpAddress::set_port(std::uint16_t port) {
  if (storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  }
}

bool TcpAddress::is_loopback() const {
  if (storage.ss_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
  return ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

std::string TcpAddress::host() const {
  char text[NI_MAXHOST] = "?";
  ::getnameinfo(raw(*this), bytes, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return text;
}

std::string TcpAddress::to_string() const {
  return storage.ss_family == AF_INET6 ? fmt::format("[{}]:{}", host(), port()) : fmt::format("{}:{}", host(), port());
}

std::vector<TcpAddress> resolve(const std::string& host, std::uint16_t port) {
  std::vector<TcpAddress> addresses;
  if (const int error = look_up(host, port, 0, addresses); error != 0) {
    throw InvalidArgument(fmt::format("expected the name or address of a host, got \"{}\": {}; check MASTER_ADDR", host,
                                      ::gai_strerror(error)));
  }
  return addresses;
}

std::optional<TcpAddress> to_numeric_address(const std::string& host, std::uint16_t port) {
  std::vector<TcpAddress> addresses;
  if (look_up(host, port, AI_NUMERICHOST, addresses) != 0 || addresses.empty()) return std::nullopt;
  return addresses.front();
}

TcpAddress own_address(const std::string& interface) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw_errno("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::vector<TcpAddress> usable;
  std::vector<std::string> names;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const sa_family_t family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    names.emplace_back(entry->ifa_name);
    const bool is_asked = interface.empty() ? (entry->ifa_flags & IFF_LOOPBACK) == 0 : interface == entry->ifa_name;
    if (!is_asked) continue;
    TcpAddress address;
    address.bytes = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    std::memcpy(&address.storage, entry->ifa_addr, address.bytes);
    usable.push_back(address);
  }
  if (usable.empty()) {
    throw InvalidArgument(fmt::format("{}; set FSDP_SOCKET_IFNAME to one of: {}",
                                      interface.empty()
                                          ? std::string("this host has no interface but its loopback")
                                          : fmt::format("FSDP_SOCKET_IFNAME: this host has no interface {} "
                                                        "that is up and has an address",
                                                        interface),
                                      fmt::join(names, ", ")));
  }
  // The name that the host goes by tells which of several is meant.
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  std::vector<TcpAddress> named;
  if (interface.empty()) look_up(name, 0, 0, named);
  for (const TcpAddress& candidate : usable) {
    if (std::any_of(named.begin(), named.end(), [&](const TcpAddress& one) { return one.host() == candidate.host(); }))
      return candidate;
  }
  return usable.front();
}

UniqueFd listen_at(const TcpAddress& address) {
  UniqueFd socket = make_socket(address);
  const int on = 1;  // a connection of an earlier job that the kernel still remembers does not hold the port
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(socket.get(), raw(address), address.bytes) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
    const int error = errno;
    if (error == EADDRINUSE) {
      const std::string holder = holder_of_port(address.port());
      throw InvalidArgument(fmt::format("cannot listen at {}: {} does; set MASTER_PORT to a port that is free",
                                        address.to_string(), holder.empty() ? "another process" : holder));
    }
    if (error == EADDRNOTAVAIL) {
      throw InvalidArgument(
          fmt::format("cannot listen at {}: this host has no such address; set MASTER_ADDR to the host of rank 0, by a "
                      "name or address that the other hosts reach it by",
                      address.to_string()));
    }
    throw std::system_error(error, std::generic_category(), "listen at " + address.to_string());
  }
  return socket;
}

std::string source_towards(const TcpAddress& address) {
  // Connecting a datagram socket sends nothing; it asks for the route.
  const UniqueFd socket(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket || ::connect(socket.get(), raw(address), address.bytes) != 0) return {};
  return local_address(socket).host();
}

std::optional<UniqueFd> connect_to(const TcpAddress& address, Clock::time_point deadline,
                                   const std::optional<TcpAddress>& own) {
  UniqueFd socket = make_socket(address);
  if (own && own->storage.ss_family == address.storage.ss_family) {
    TcpAddress from = *own;
    from.set_port(0);
    if (::bind(socket.get(), raw(from), from.bytes) != 0) throw_errno("bind to " + from.host());
  }
  int error = ::connect(socket.get(), raw(address), address.bytes) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    if (!wait_for(socket, POLLOUT, deadline)) return std::nullopt;
    socklen_t bytes = sizeof(error);
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  }
  if (nobody_is_there(error)) return std::nullopt;
  if (error != 0) throw std::system_error(error, std::generic_category(), "connect to " + address.to_string());
  // Where nobody listens on a port that the system hands out, a socket may be given that very port and meet itself.
  if (local_address(socket).to_string() == address.to_string()) return std::nullopt;
  return without_delay(std::move(socket));
}

std::optional<UniqueFd> accept_from(const UniqueFd& listener) {
  UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) return std::nullopt;  // one that gave up, too, or no descriptor is left: those who wait try again
  return without_delay(std::move(socket));
}

TcpAddress local_address(const UniqueFd& socket) { return address_by(socket, ::getsockname); }

TcpAddress peer_address(const UniqueFd& socket) { return address_by(socket, ::getpeername); }

bool send_all(const UniqueFd& socket, std::span<const std::byte> bytes, Clock::time_point deadline) {
  return move_all(socket, bytes, POLLOUT, deadline, [&](std::span<const std::byte> rest) {
    return ::send(socket.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
  });
}

bool receive_all(const UniqueFd& socket, std::span<std::byte> bytes, Clock::time_point deadline) {
  return move_all(socket, bytes, POLLIN, deadline,
                  [&](std::span<std::byte> rest) { return ::recv(socket.get(), rest.data(), rest.size(), 0); });
}

}  // namespace fsdp
