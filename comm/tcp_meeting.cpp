#include "comm/tcp_meeting.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include <sys/socket.h>

#include "comm/meeting_error.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kRetryInterval{20};
constexpr std::chrono::milliseconds kLook{100};  // for a guest that has gone again
constexpr std::size_t kMaxRefusalBytes = 4096;
constexpr std::chrono::seconds kPatience{2};  // with one that may not be rank 0

// Rank 0's answer to a greeting: the bytes that follow are a table of the ranks, or a text that says why not.
struct AnswerHeader {
  std::uint32_t is_welcome = 0, bytes = 0;
};

struct TableEntry {
  TcpAddress address = {};
  std::int32_t pid = 0;
  char host[64] = {};
  char boot[40] = {};
};

Greeting greeting_of(const TcpPlace& place, Lane lane, std::uint16_t port) {
  Greeting greeting{.rank = place.rank, .world_size = place.world_size, .pid = ::getpid(), .lane = lane, .port = port};
  ::gethostname(greeting.host, sizeof(greeting.host) - 1);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  boot.copy(greeting.boot, sizeof(greeting.boot) - 1);
  return greeting;
}

bool has_gone(const UniqueFd& socket) {
  std::byte byte{};
  const ssize_t seen = ::recv(socket.get(), &byte, 1, MSG_PEEK);
  return seen == 0 || (seen < 0 && errno != EAGAIN && errno != EINTR);
}

bool send_answer(const UniqueFd& guest, bool is_welcome, std::span<const std::byte> bytes, Clock::time_point deadline) {
  const AnswerHeader header{is_welcome, static_cast<std::uint32_t>(bytes.size())};
  return send_all(guest, std::as_bytes(std::span(&header, 1)), deadline) && send_all(guest, bytes, deadline);
}

MeetingTerms terms_of(const TcpPlace& place) { return {place.name, place.world_size, place.timeout}; }

std::string text_of(const TableEntry& entry) { return process_text(entry.pid, entry.host); }

std::vector<TableEntry> table_for_one(const Greeting& self) {
  TableEntry entry{.pid = self.pid};
  std::memcpy(entry.host, self.host, sizeof(entry.host));
  std::memcpy(entry.boot, self.boot, sizeof(entry.boot));
  return {entry};
}

// Rank 0's first part: the control lanes of all others, and the table that they get.
class Host {
 public:
  Host(const TcpPlace& place, Door& door, std::vector<PeerSockets>& sockets)
      : place_(place), door_(door), sockets_(sockets), table_(table_for_one(greeting_of(place, Lane::kControl, 0))) {
    table_.resize(sockets.size());
  }

  std::vector<TableEntry> admit_all(Clock::time_point deadline) {
    try {
      while (!missing().empty()) {
        if (Clock::now() >= deadline) throw_missing();
        if (auto guest = door_.next(std::min(deadline, Clock::now() + kLook))) admit(std::move(*guest));
        throw_if_one_has_gone();
      }
    } catch (const Error& error) {
      refuse_all(error.what());
      throw;
    }
    const auto bytes = std::as_bytes(std::span(table_));
    for (const PeerSockets& peer : sockets_) {
      if (peer.control) send_answer(peer.control, true, bytes, deadline);  // one that has gone is seen by all
    }
    return std::move(table_);
  }

 private:
  void admit(Guest guest) {
    const Greeting& greeting = guest.greeting;
    const bool valid = greeting.world_size == place_.world_size && greeting.rank > 0 &&
                       greeting.rank < place_.world_size && greeting.lane == Lane::kControl;
    const auto rank = static_cast<std::size_t>(greeting.rank);
    if (!valid || sockets_[rank].control) {
      const std::string process = process_text(greeting.pid, greeting.host);
      const InvalidArgument error = valid ? two_are_one_rank(greeting.rank, text_of(table_[rank]), process)
                                          : of_another_job(place_.world_size, greeting.rank, greeting.world_size,
                                                           process);
      refuse(guest.socket, error.what());
      throw error;
    }
    TableEntry& entry = table_[rank];
    entry.address = peer_address(guest.socket);
    entry.address.set_port(greeting.port);
    entry.pid = greeting.pid;
    std::memcpy(entry.host, greeting.host, sizeof(entry.host));
    std::memcpy(entry.boot, greeting.boot, sizeof(entry.boot));
    sockets_[rank].control = std::move(guest.socket);
  }

  void throw_if_one_has_gone() const {
    for (std::size_t rank = 1; rank < sockets_.size(); ++rank) {
      if (!sockets_[rank].control || !has_gone(sockets_[rank].control)) continue;
      throw ended_early(static_cast<int>(rank), text_of(table_[rank]));
    }
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (std::size_t rank = 1; rank < sockets_.size(); ++rank) {
      if (!sockets_[rank].control) ranks.push_back(static_cast<int>(rank));
    }
    return ranks;
  }

  [[noreturn]] void throw_missing() const {
    const std::string strangers =
        door_.turned_away() == 0
            ? ""
            : fmt::format(
                  " ({} connections without this job's token were turned away: FSDP_JOB_TOKEN has to be the same "
                  "on every rank)",
                  door_.turned_away());
    MeetingTerms terms = terms_of(place_);
    terms.at = door_.address().to_string();
    throw ranks_are_missing(
        terms, missing(), strangers,
        "start them with the same MASTER_ADDR and MASTER_PORT, see that no firewall keeps them out");
  }

  static void refuse(const UniqueFd& guest, std::string_view reason) {
    const std::string_view part = reason.substr(0, kMaxRefusalBytes);
    send_answer(guest, false, std::as_bytes(std::span(part)), Clock::now() + kLook);
  }

  void refuse_all(std::string_view reason) {
    for (const PeerSockets& peer : sockets_) {
      if (peer.control) refuse(peer.control, reason);
    }
  }

  const TcpPlace& place_;
  Door& door_;
  std::vector<PeerSockets>& sockets_;
  std::vector<TableEntry> table_;
};

// A rank's way to rank 0, and its own door, at the address that leads there.
struct Entrance {
  UniqueFd link;
  Door door;
};

// Goes to rank 0 until it is there. Sets the token that holds there.
Entrance enter(TcpPlace& place, Clock::time_point deadline) {
  bool was_answered = false;
  std::string tried = "nothing, as no address was found there";
  while (Clock::now() < deadline) {
    const std::optional<TcpSpot> spot = place.find();
    for (std::size_t i = 0; spot && i < spot->addresses.size(); ++i) {
      const auto end = place.may_be_stale ? std::min(deadline, Clock::now() + kPatience) : deadline;
      auto link = connect_to(spot->addresses[i], end, place.own);
      tried = fmt::format("{} from {}", spot->addresses[i].to_string(),
                          place.own ? place.own->host() : source_towards(spot->addresses[i]));
      if (!link) continue;
      TcpAddress address = local_address(*link);
      address.set_port(0);
      Door door(listen_at(address), spot->token);
      const Greeting greeting = greeting_of(place, Lane::kControl, door.address().port());
      if (greet(*link, spot->token, greeting, end)) {
        place.token = spot->token;
        return {std::move(*link), std::move(door)};
      }
      was_answered = true;
    }
    // One that closes early may be rank 0 of this job that has just failed: it is not there again.
    if (was_answered && !place.may_be_stale) break;
    std::this_thread::sleep_for(kRetryInterval);
  }
  if (was_answered) {
    throw CommunicationError(
        fmt::format(
            "rendezvous at {}: who listens there is not rank 0 of this job, or has just ended: rank {} was not let "
            "in; set FSDP_JOB_TOKEN to the same on every rank and MASTER_PORT to a port of this job's own, and see "
            "rank 0's own output",
            place.name, place.rank),
        0);
  }
  throw met_no_rank_0(terms_of(place), place.rank, fmt::format(" (tried {})", tried),
                      "start rank 0 there, see that no firewall keeps this host out");
}

std::vector<TableEntry> hear_answer(const UniqueFd& link, const TcpPlace& place, Clock::time_point deadline) {
  AnswerHeader header;
  std::vector<TableEntry> table(static_cast<std::size_t>(place.world_size));
  std::vector<std::byte> bytes;
  bool heard = receive_all(link, std::as_writable_bytes(std::span(&header, 1)), deadline);
  const std::size_t proper = header.is_welcome != 0 ? table.size() * sizeof(TableEntry) : kMaxRefusalBytes;
  if (heard && header.bytes <= proper) {
    bytes.resize(header.bytes);
    heard = receive_all(link, bytes, deadline);
  }
  const bool is_table = heard && header.is_welcome != 0 && bytes.size() == proper;
  if (is_table) {
    std::memcpy(table.data(), bytes.data(), bytes.size());
    return table;
  }
  if (heard && header.is_welcome == 0 && !bytes.empty())
    throw refused_by_rank_0({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  if (Clock::now() >= deadline) throw rank_0_did_not_answer(terms_of(place), place.rank);
  throw rank_0_ended(terms_of(place), place.rank);
}

UniqueFd& lane_of(PeerSockets& sockets, Lane lane) { return lane == Lane::kControl ? sockets.control : sockets.bulk; }

void connect_to_lower(const TcpPlace& place, const std::vector<TableEntry>& table, std::uint16_t port,
                      std::vector<PeerSockets>& sockets, Clock::time_point deadline) {
  for (int peer = 0; peer < place.rank; ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    for (const Lane lane : {Lane::kControl, Lane::kBulk}) {
      UniqueFd& socket = lane_of(sockets[index], lane);
      if (socket) continue;
      const TcpAddress& address = table[index].address;
      auto connection = connect_to(address, deadline, place.own);
      if (!connection || !greet(*connection, place.token, greeting_of(place, lane, port), deadline)) {
        throw CommunicationError(
            fmt::format("rendezvous: rank {} cannot reach rank {} ({}) at {}; every rank has to reach every other: "
                        "open the ports of net.ipv4.ip_local_port_range between the hosts, and see rank {}'s own "
                        "output",
                        place.rank, peer, text_of(table[index]), address.to_string(), peer),
            peer);
      }
      socket = std::move(*connection);
    }
  }
}

void wait_for_higher(const TcpPlace& place, const std::vector<TableEntry>& table, Door& door,
                     std::vector<PeerSockets>& sockets, Clock::time_point deadline) {
  const auto missing = [&]() -> int {
    for (int peer = place.rank + 1; peer < place.world_size; ++peer) {
      const PeerSockets& pair = sockets[static_cast<std::size_t>(peer)];
      if (!pair.control || !pair.bulk) return peer;
    }
    return -1;
  };
  for (int absent = missing(); absent >= 0; absent = missing()) {
    if (auto guest = door.next(deadline)) {
      const int peer = guest->greeting.rank;
      if (peer <= place.rank || peer >= place.world_size || guest->greeting.lane > Lane::kBulk) continue;
      UniqueFd& socket = lane_of(sockets[static_cast<std::size_t>(peer)], guest->greeting.lane);
      if (!socket) socket = std::move(guest->socket);
      continue;
    }
    throw CommunicationError(
        fmt::format(
            "rendezvous: rank {} ({}) did not connect to rank {} at {} within {} s; every rank has to reach every "
            "other: open the ports of net.ipv4.ip_local_port_range between the hosts",
            absent, text_of(table[static_cast<std::size_t>(absent)]), place.rank, door.address().to_string(),
            std::chrono::duration<double>(place.timeout).count()),
        absent);
  }
}

void describe_ranks(const std::vector<TableEntry>& table, TcpMeeting& meeting) {
  for (const TableEntry& entry : table) meeting.hosts.push_back(fmt::format("{} {}", entry.host, entry.boot));
  const bool one_host = std::all_of(meeting.hosts.begin(), meeting.hosts.end(),
                                    [&](const std::string& host) { return host == meeting.hosts.front(); });
  for (const TableEntry& entry : table) meeting.processes.push_back({entry.pid, one_host ? "" : entry.host});
}

}  // namespace

TcpMeeting meet_over_tcp(TcpPlace place) {
  // Rank 0 knows who is missing, so the others give it the time to say so.
  const auto deadline = Clock::now() + place.timeout + std::chrono::seconds(place.rank == 0 ? 0 : 2);
  TcpMeeting meeting;
  meeting.sockets.resize(static_cast<std::size_t>(place.world_size));
  std::vector<TableEntry> table;
  if (place.world_size == 1) {
    table = table_for_one(greeting_of(place, Lane::kControl, 0));
  } else if (place.rank == 0) {
    Door door(std::move(place.listener), place.token);
    table = Host(place, door, meeting.sockets).admit_all(deadline);
    wait_for_higher(place, table, door, meeting.sockets, deadline);
  } else {
    auto [link, door] = enter(place, deadline);
    const std::uint16_t port = door.address().port();
    table = hear_answer(link, place, deadline);
    meeting.sockets[0].control = std::move(link);
    table[0].address = peer_address(meeting.sockets[0].control);
    connect_to_lower(place, table, port, meeting.sockets, deadline);
    wait_for_higher(place, table, door, meeting.sockets, deadline);
  }
  describe_ranks(table, meeting);
  return meeting;
}

}  // namespace fsdp
