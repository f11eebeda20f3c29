#include "comm/tcp_rendezvous.h"

#include <algorithm>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "comm/meeting_file.h"
#include "comm/tcp_endpoint.h"

namespace fsdp {
namespace {

JobToken require_token(const Variables& variables, const LaunchIdentity& self) {
  if (const std::optional<JobToken> token = job_token(variables)) return *token;
  throw InvalidArgument(
      fmt::format(
          "rank {} of {}: ranks that meet over TCP need a secret of their own: set FSDP_JOB_TOKEN_FILE on every rank "
          "to a file of mode 600 made with: openssl rand -hex 32 (or FSDP_JOB_TOKEN to its contents), or meet at "
          "init_method file:///path on a file system that all share",
          self.rank, self.world_size),
      self.rank);
}

std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, ' ');
  return text;
}

// Where rank 0 is to listen. On many hosts their own name stands for a loopback address, which leads others to themselves.
TcpAddress reachable(const std::vector<TcpAddress>& addresses, const TcpEndpoint& endpoint,
                     const LaunchIdentity& self) {
  if (self.local_world_size == self.world_size) return addresses.front();
  for (const TcpAddress& address : addresses) {
    if (!address.is_loopback()) return address;
  }
  throw InvalidArgument(
      fmt::format(
          "MASTER_ADDR: {} is {} here, an address that no other host can reach; set MASTER_ADDR to this host's own "
          "address, {}, on every rank, or give the name that address in /etc/hosts",
          endpoint.host, addresses.front().host(), own_address("").host()),
      self.rank);
}

// A start that no launcher tells apart has an empty job, as has its file.
void meet_by_file(TcpPlace& place, const std::filesystem::path& path, const LaunchIdentity& self) {
  const std::string job = one_line(self.job);
  place.name = path.string();
  place.may_be_stale = true;
  place.find = [path, job]() -> std::optional<TcpSpot> {
    std::optional<MeetingFile> file = read_meeting_file(path);
    if (!file || file->job != job) return std::nullopt;
    return TcpSpot{std::move(file->addresses), file->token};
  };
  if (self.rank != 0) return;
  const bool is_alone_here = self.local_world_size == self.world_size && !self.launcher.empty();
  place.listener = listen_at(place.own       ? *place.own
                             : is_alone_here ? resolve("127.0.0.1", 0).front()
                                             : own_address(""));
  place.token = random_token();
  write_meeting_file(path, {job, place.token, {local_address(place.listener)}});
}

}  // namespace

TcpPlace tcp_place(const Variables& variables, const LaunchIdentity& self, const std::string& init_method,
                   std::chrono::milliseconds timeout, std::chrono::milliseconds silence) {
  TcpPlace place{.rank = self.rank, .world_size = self.world_size, .timeout = timeout, .silence = silence};
  if (self.world_size == 1) return place;
  if (const auto interface = variables.find("FSDP_SOCKET_IFNAME"); interface != variables.end())
    place.own = own_address(interface->second);
  const TcpEndpoint endpoint = tcp_endpoint(variables, self, init_method);
  if (!endpoint.file.empty()) {
    meet_by_file(place, endpoint.file, self);
    return place;
  }
  const TcpSpot spot{resolve(endpoint.host, endpoint.port), require_token(variables, self)};
  place.name = fmt::format("{}:{}", endpoint.host, endpoint.port);
  place.find = [spot] { return spot; };
  place.token = spot.token;
  if (self.rank == 0) place.listener = listen_at(reachable(spot.addresses, endpoint, self));
  return place;
}

}  // namespace fsdp
