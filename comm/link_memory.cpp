#include "comm/link_memory.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kFarewell{2};  // for the last frames of a rank that ends

std::vector<std::byte> to_bytes(const void* data, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  return {begin, begin + bytes};
}

}  // namespace

class LinkMemory::LinkFetch final : public PeerMemory::Fetch {
 public:
  explicit LinkFetch(LinkMemory& memory) : memory_(memory) {}
  ~LinkFetch() override {
    const std::lock_guard lock(memory_.fetch_mutex_);
    for (const std::uint64_t id : ids_) memory_.expected_.erase(id);
  }
  bool is_done() const override { return missing_.load() == 0 || lost_.load() >= 0; }
  int lost() const override { return lost_; }
  int awaited() const override {
    const std::lock_guard lock(memory_.fetch_mutex_);
    for (const std::uint64_t id : ids_) {
      if (const auto expected = memory_.expected_.find(id); expected != memory_.expected_.end())
        return expected->second.peer;
    }
    return -1;
  }

 private:
  friend LinkMemory;
  LinkMemory& memory_;
  std::vector<std::uint64_t> ids_;
  std::atomic<std::size_t> missing_{0};
  std::atomic<int> lost_{-1};
};

LinkMemory::LinkMemory(std::vector<PeerSockets> sockets, const Options& options)
    : rank_(options.rank),
      timeout_(options.timeout),
      silence_(options.silence),
      owner_(::getpid()),
      control_memory_(ControlBlock::bytes_for(static_cast<int>(options.processes.size()))),
      control_(ControlBlock::create(control_memory_.span(), static_cast<int>(options.processes.size()),
                                    /*mirrored=*/true)),
      staging_{.bytes = 2 * kStagingBytes, .parts = std::vector<std::byte*>(options.processes.size())},
      peers_(options.processes.size()),
      pulses_(options.processes.size(), options.silence, Clock::now()),
      service_(std::move(sockets), *this) {
  staging_.parts[static_cast<std::size_t>(rank_)] = control_.staging(rank_);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    RankSlot& slot = control_.slot(static_cast<int>(rank));
    slot.pid = options.processes[rank].pid;
    options.processes[rank].host.copy(slot.host, sizeof(slot.host) - 1);
  }
  service_.start();
}

LinkMemory::~LinkMemory() {
  if (::getpid() != owner_) return;
  stay_until_done();
  service_.finish(kFarewell);
}

std::shared_ptr<const PeerRegion> LinkMemory::collect(std::size_t bytes) { return collect_parts(bytes, false); }

std::shared_ptr<const PeerRegion> LinkMemory::collect_board(std::size_t bytes) { return collect_parts(bytes, true); }

std::shared_ptr<const PeerRegion> LinkMemory::collect_parts(std::size_t bytes, bool is_board) {
  const auto ranks = peers_.size(), own = static_cast<std::size_t>(rank_);
  const auto region = std::make_shared<PeerRegion>();
  {
    const std::lock_guard lock(mutex_);
    region->id = next_region_++;
    ++held_;
  }
  // From here on the peers learn when this rank needs the region no longer, or never got it.
  region->owner = std::shared_ptr<const void>(nullptr, [this, id = region->id](const void*) { release(id); });
  region->bytes = bytes;
  if (bytes > std::numeric_limits<std::size_t>::max() / 2 / ranks)
    throw std::system_error(ENOMEM, std::generic_category(), "allocate");
  const auto memory = std::make_shared<const MappedMemory>(is_board ? ranks * bytes : bytes);
  region->parts.resize(ranks);
  region->parts[own] = memory->span().data();
  for (std::size_t rank = 0; rank < ranks && is_board; ++rank)
    region->parts[rank] = memory->span().data() + rank * bytes;
  const std::lock_guard lock(mutex_);
  const auto [entry, _] = regions_.emplace(region->id, Region{memory, bytes, is_board, std::vector<bool>(ranks, true)});
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (peers_[rank].gone) entry->second.holders[rank] = false;
  }
  return region;
}

// A rank without the memory for a few words is at its end: its peers see that at once, rather than wait for the words.
template <class Tell>
void LinkMemory::tell_or_sever(const Tell& tell) noexcept {
  try {
    tell();
  } catch (const std::bad_alloc&) {
    service_.sever();
  }
}

// A board is posted to and never asked for, so its memory goes with this rank's handle.
void LinkMemory::release(std::uint64_t id) noexcept {
  {
    const std::lock_guard lock(mutex_);
    --held_;
    if (const auto region = regions_.find(id); region != regions_.end()) {
      if (region->second.is_board) std::fill(region->second.holders.begin(), region->second.holders.end(), false);
      drop_holder(region, rank_);
    }
  }
  tell_or_sever([&] {
    service_.send_to_all({.header = {.kind = FrameKind::kRelease, .a = id}});
    tell_done();
  });
}

void LinkMemory::drop_holder(std::map<std::uint64_t, Region>::iterator region, int rank) {
  std::vector<bool>& holders = region->second.holders;
  holders[static_cast<std::size_t>(rank)] = false;
  if (std::none_of(holders.begin(), holders.end(), [](bool holds) { return holds; })) regions_.erase(region);
}

std::unique_ptr<PeerMemory::Fetch> LinkMemory::fetch(std::span<const PeerCopy> copies) {
  auto fetch = std::make_unique<LinkFetch>(*this);
  struct Request {
    int peer;
    OutgoingFrame frame;
  };
  std::vector<Request> requests;
  {
    const std::lock_guard lock(fetch_mutex_);
    for (const PeerCopy& copy : copies) {
      for (std::size_t begin = 0; begin < copy.target.size(); begin += kMaxReplyBytes) {
        const auto target = copy.target.subspan(begin, std::min(kMaxReplyBytes, copy.target.size() - begin));
        const std::uint64_t id = next_id_++, bytes = target.size();
        expected_.emplace(id, Expected{fetch.get(), copy.rank, target});
        fetch->ids_.push_back(id);
        requests.push_back(
            {copy.rank,
             {.header = {.kind = FrameKind::kRequest, .a = id, .b = copy.region->id, .c = copy.offset + begin},
              .own = to_bytes(&bytes, sizeof(bytes))}});
      }
    }
    fetch->missing_ = fetch->ids_.size();
  }
  for (Request& request : requests) service_.send(request.peer, Lane::kControl, std::move(request.frame));
  // A peer that went before its replies were expected here is not seen by lose().
  const std::lock_guard lock(mutex_);
  for (const PeerCopy& copy : copies) {
    if (peers_[static_cast<std::size_t>(copy.rank)].gone) fetch->lost_ = copy.rank;
  }
  return fetch;
}

void LinkMemory::announce_arrival(std::uint64_t meeting) {
  const RankSlot& slot = control_.slot(rank_);
  const Arrival arrival{slot.calls[meeting % 2], slot.errors[meeting % 2]};
  // The lock orders what this thread has written before what the serving thread reads for a peer.
  { const std::lock_guard lock(mutex_); }
  service_.send_to_all(
      {.header = {.kind = FrameKind::kArrival, .a = meeting}, .own = to_bytes(&arrival, sizeof(arrival))});
}

void LinkMemory::announce_words(const PeerRegion& region, int index, std::span<const std::uint64_t> words) {
  constexpr std::size_t kWords = kMaxFrameBytes / sizeof(std::uint64_t);
  { const std::lock_guard lock(mutex_); }  // as above
  for (std::size_t begin = 0; begin < words.size(); begin += kWords) {
    const auto part = words.subspan(begin, std::min(kWords, words.size() - begin));
    service_.send_to_all(
        {.header = {.kind = FrameKind::kWords, .a = region.id, .b = static_cast<std::uint64_t>(index) + begin},
         .own = to_bytes(part.data(), part.size_bytes())});
  }
}

void LinkMemory::announce_abort() noexcept {
  tell_or_sever([&] {
    const std::string_view reason = control_.reason();
    service_.send_to_all({.header = {.kind = FrameKind::kAbort, .a = static_cast<std::uint64_t>(control_.culprit())},
                          .own = to_bytes(reason.data(), reason.size())});
  });
}

void LinkMemory::announce_leave() noexcept {
  tell_or_sever([&] { service_.send_to_all({.header = {.kind = FrameKind::kLeave}}); });
}

void LinkMemory::end_collective() noexcept {
  tell_or_sever([&] {
    {
      const std::lock_guard lock(mutex_);
      ended_meeting_ = control_.slot(rank_).arrived.load();
    }
    tell_done();
  });
}

std::vector<int> LinkMemory::ended() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    if (peers_[rank].gone) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

ssize_t LinkMemory::receive_reply(int socket, int peer, const FrameHeader& header, std::size_t got) {
  constexpr std::size_t kPart = std::size_t{256} << 10;  // received under the lock at once
  const std::size_t bytes = std::min<std::size_t>(header.payload_bytes - got, kPart);
  pulses_.hear(peer, Clock::now());
  const std::lock_guard lock(fetch_mutex_);
  const auto expected = expected_.find(header.a);
  if (expected == expected_.end()) {  // withdrawn
    std::array<std::byte, 4096> dropped;
    return ::recv(socket, dropped.data(), std::min(bytes, dropped.size()), MSG_DONTWAIT);
  }
  if (expected->second.peer != peer || expected->second.target.size() != header.payload_bytes)
    throw InvalidArgument("it answered another request than it was sent; start all ranks with the same build", peer);
  return ::recv(socket, expected->second.target.data() + got, bytes, MSG_DONTWAIT);
}

void LinkMemory::take(int peer, const FrameHeader& header, std::span<const std::byte> payload) {
  pulses_.hear(peer, Clock::now());
  switch (header.kind) {
    case FrameKind::kArrival: return take_arrival(peer, header.a, payload);
    case FrameKind::kWords: return take_words(peer, header.a, header.b, payload);
    case FrameKind::kAbort: {
      const int culprit = header.a < peers_.size() ? static_cast<int>(header.a) : peer;
      // Passed on, so that it comes before the end of a rank that has heard it.
      if (control_.abort(culprit, {reinterpret_cast<const char*>(payload.data()), payload.size()})) announce_abort();
      return;
    }
    case FrameKind::kLeave:
      control_.slot(peer).presence.store(Presence::kLeft);
      {
        const std::lock_guard lock(mutex_);
        peers_[static_cast<std::size_t>(peer)].is_done = true;
      }
      ring();
      return tell_done();
    case FrameKind::kDone: {
      const std::lock_guard lock(mutex_);
      peers_[static_cast<std::size_t>(peer)].is_done = true;
      return;
    }
    case FrameKind::kRelease: {
      const std::lock_guard lock(mutex_);
      if (const auto region = regions_.find(header.a); region != regions_.end()) drop_holder(region, peer);
      return;
    }
    case FrameKind::kBeat: {
      std::array<std::uint64_t, RankStatus::kWords> words;
      std::memcpy(words.data(), payload.data(), payload.size());
      control_.slot(peer).status.set_words(words);
      pulses_.set_traced(peer, header.a != 0);
      return;
    }
    case FrameKind::kRequest: return answer(peer, header, payload);
    case FrameKind::kReply: return finish_reply(header.a);
  }
}

void LinkMemory::take_arrival(int peer, std::uint64_t meeting, std::span<const std::byte> payload) {
  Arrival arrival;
  std::memcpy(&arrival, payload.data(), sizeof(arrival));
  RankSlot& slot = control_.slot(peer);
  if (meeting != slot.arrived.load() + 1 || arrival.call.operation > Operation::kCheck)
    throw InvalidArgument("it came to a collective out of turn; start all ranks with the same build", peer);
  slot.calls[meeting % 2] = arrival.call;
  slot.errors[meeting % 2] = arrival.error;
  slot.status.set_activity({arrival.call.operation});
  control_.arrive(peer, meeting);
}

void LinkMemory::take_words(int peer, std::uint64_t id, std::uint64_t index, std::span<const std::byte> payload) {
  const std::size_t count = payload.size() / sizeof(std::uint64_t);
  {
    const std::lock_guard lock(mutex_);
    const auto region = regions_.find(id);
    if (region == regions_.end()) return;  // this rank has no use for the board any more
    const std::size_t words = region->second.bytes / sizeof(std::uint64_t);
    if (!region->second.is_board || index > words || count > words - index)
      throw InvalidArgument("it posted words that its board does not have; start all ranks with the same build", peer);
    auto* part = reinterpret_cast<std::atomic<std::uint64_t>*>(region->second.memory->span().data() +
                                                               static_cast<std::size_t>(peer) * region->second.bytes);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, payload.data() + i * sizeof(word), sizeof(word));
      part[index + i].store(word, std::memory_order_release);
    }
  }
  control_.doorbell.ring();
}

void LinkMemory::answer(int peer, const FrameHeader& request, std::span<const std::byte> payload) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, payload.data(), sizeof(bytes));
  OutgoingFrame reply{.header = {.kind = FrameKind::kReply, .a = request.a}};
  {
    const std::lock_guard lock(mutex_);
    std::span<const std::byte> part{staging_.parts[static_cast<std::size_t>(rank_)], staging_.bytes};
    if (request.b != staging_.id) {
      const auto region = regions_.find(request.b);
      const bool is_there = region != regions_.end() && !region->second.is_board;
      part = is_there ? region->second.memory->span() : std::span<std::byte>();
      if (is_there) reply.keep = region->second.memory;
    }
    if (bytes == 0 || bytes > kMaxReplyBytes || request.c > part.size() || bytes > part.size() - request.c)
      throw InvalidArgument("it asked for bytes that this rank does not have; start all ranks with the same build",
                            peer);
    reply.borrowed = part.subspan(request.c, bytes);
  }
  service_.send(peer, Lane::kBulk, std::move(reply));
}

void LinkMemory::finish_reply(std::uint64_t id) {
  {
    const std::lock_guard lock(fetch_mutex_);
    const auto expected = expected_.find(id);
    if (expected == expected_.end()) return;
    LinkFetch& fetch = *expected->second.fetch;
    expected_.erase(expected);
    if (fetch.missing_.fetch_sub(1) != 1) return;
  }
  control_.doorbell.ring();
}

void LinkMemory::lose(int peer, std::string_view why) {
  if (!why.empty()) {
    const std::string reason = fmt::format("rank {} takes no further part: {} (seen by rank {})", peer, why, rank_);
    if (control_.abort(peer, reason)) announce_abort();
    service_.sever(peer);
  }
  {
    const std::lock_guard lock(mutex_);
    Peer& state = peers_[static_cast<std::size_t>(peer)];
    state.gone = state.is_done = true;
    for (auto region = regions_.begin(); region != regions_.end();) drop_holder(region++, peer);
  }
  {
    const std::lock_guard lock(fetch_mutex_);
    for (const auto& [id, expected] : expected_) {
      if (expected.peer == peer) expected.fetch->lost_ = peer;
    }
  }
  ring();
}

void LinkMemory::tick() {
  const auto now = Clock::now();
  pulses_.tick(now);
  const auto words = control_.slot(rank_).status.words();
  service_.send_to_all(
      {.header = {.kind = FrameKind::kBeat, .a = is_traced() ? 1U : 0U}, .own = to_bytes(words.data(), sizeof(words))});
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) lose_if_silent(static_cast<int>(peer), now);
}

void LinkMemory::lose_if_silent(int peer, Clock::time_point now) {
  if (peer == rank_ || !pulses_.is_silent(peer, now)) return;
  {
    const std::lock_guard lock(mutex_);
    const Peer& state = peers_[static_cast<std::size_t>(peer)];
    if (state.gone || state.is_done) return;
  }
  const RankSlot& slot = control_.slot(peer);
  lose(peer, fmt::format("it has been silent for {} s, last in {}; it is stopped, or its host or the network is gone "
                         "(pid {}{}{})",
                         std::chrono::duration<double>(silence_).count(), slot.status.activity(), slot.pid,
                         slot.host[0] == '\0' ? "" : " on ", slot.host));
}

// NOTE [Leaving over links]
void LinkMemory::tell_done() {
  std::vector<int> told;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      Peer& peer = peers_[rank];
      const RankSlot& slot = control_.slot(static_cast<int>(rank));
      if (peer.is_told || slot.presence.load() != Presence::kLeft || static_cast<int>(rank) == rank_) continue;
      if (held_ > 0 || ended_meeting_ < slot.arrived.load()) continue;
      peer.is_told = true;
      told.push_back(static_cast<int>(rank));
    }
  }
  for (const int rank : told) service_.send(rank, Lane::kControl, {.header = {.kind = FrameKind::kDone}});
}

void LinkMemory::stay_until_done() {
  const auto end = Clock::now() + timeout_;
  const auto is_over = [&] {
    const std::lock_guard lock(mutex_);
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      if (static_cast<int>(rank) != rank_ && !peers_[rank].is_done) return false;
    }
    return true;
  };
  while (!is_over() && !control_.aborted() && Clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void LinkMemory::ring() {
  control_.meeting_bell.ring();
  control_.doorbell.ring();
}

}  // namespace fsdp
