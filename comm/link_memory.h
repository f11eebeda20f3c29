// The memory of ranks that share none: each keeps its own part of every allocation, mirrors what the others post, and
// answers their requests for bytes.
//
// NOTE [Leaving over links] What a rank has staged or allocated is read by its peers from it, while it lives. A rank
// that leaves says so and then stays until each peer has answered that it is done with it, has left itself, or is gone.
// A peer answers once it has come out of the last collective that the two had in common and holds no segment. The wait
// ends with the timeout, and at once where the group is aborted.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <unordered_map>

#include <sys/types.h>

#include "comm/link_service.h"
#include "comm/mapped_memory.h"
#include "comm/peer_memory.h"
#include "comm/pulse.h"

namespace fsdp {

struct PeerProcess {
  std::int32_t pid = 0;
  std::string host = {};  // empty where all are on one
};

class LinkMemory final : public PeerMemory, private FrameHandler {
 public:
  struct Options {
    int rank = 0;
    std::vector<PeerProcess> processes;  // by rank
    std::chrono::milliseconds timeout{};
    std::chrono::milliseconds silence{};  // after which a peer that is not heard of is dead; 0 = never
  };
  LinkMemory(std::vector<PeerSockets> sockets, const Options& options);
  ~LinkMemory() override;

  ControlBlock& control() override { return control_; }
  const PeerRegion& staging() override { return staging_; }
  void offer(std::size_t) override {}  // every rank makes its own part
  std::shared_ptr<const PeerRegion> collect(std::size_t bytes) override;
  std::shared_ptr<const PeerRegion> collect_board(std::size_t bytes) override;
  std::unique_ptr<Fetch> fetch(std::span<const PeerCopy> copies) override;
  void announce_arrival(std::uint64_t meeting) override;
  void announce_words(const PeerRegion& region, int index, std::span<const std::uint64_t> words) override;
  void announce_abort() noexcept override;
  void announce_leave() noexcept override;
  void end_collective() noexcept override;
  void die() override { service_.sever(); }
  std::vector<int> ended() const override;

 private:
  class LinkFetch;
  struct Region {
    std::shared_ptr<const MappedMemory> memory;
    std::size_t bytes = 0;      // of a part
    bool is_board = false;      // with all parts
    std::vector<bool> holders;  // ranks whose handle lives
  };
  struct Expected {  // a reply under way
    LinkFetch* fetch = nullptr;
    int peer = 0;
    std::span<std::byte> target = {};
  };
  struct Peer {
    bool gone = false;     // its connection has ended
    bool is_done = false;  // wants nothing of this rank any more
    bool is_told = false;  // it leaves, and has been told that this rank is done with it
  };

  ssize_t receive_reply(int socket, int peer, const FrameHeader& header, std::size_t got) override;
  void take(int peer, const FrameHeader& header, std::span<const std::byte> payload) override;
  void lose(int peer, std::string_view why) override;
  void tick() override;

  std::shared_ptr<const PeerRegion> collect_parts(std::size_t bytes, bool is_board);
  void release(std::uint64_t region) noexcept;
  void drop_holder(std::map<std::uint64_t, Region>::iterator region, int rank);
  void take_arrival(int peer, std::uint64_t meeting, std::span<const std::byte> payload);
  void take_words(int peer, std::uint64_t region, std::uint64_t index, std::span<const std::byte> payload);
  void answer(int peer, const FrameHeader& request, std::span<const std::byte> payload);
  void finish_reply(std::uint64_t id);
  void lose_if_silent(int peer, std::chrono::steady_clock::time_point now);
  template <class Tell>
  void tell_or_sever(const Tell& tell) noexcept;
  void tell_done();
  void stay_until_done();
  void ring();

  const int rank_;
  const std::chrono::milliseconds timeout_, silence_;
  const pid_t owner_;
  const MappedMemory control_memory_;
  ControlBlock& control_;
  PeerRegion staging_;

  mutable std::mutex mutex_;  // of the next five
  std::map<std::uint64_t, Region> regions_;
  std::vector<Peer> peers_;
  std::uint64_t next_region_ = 1;  // 0 is the staging area
  int held_ = 0;                   // regions whose handle lives here
  std::uint64_t ended_meeting_ = 0;

  std::mutex fetch_mutex_;  // held while bytes are received into a target, so that it can be withdrawn
  std::unordered_map<std::uint64_t, Expected> expected_;
  std::uint64_t next_id_ = 1;

  Pulses pulses_;  // the serving thread's

  LinkService service_;  // last: its thread uses all of the above
};

}  // namespace fsdp
