#include "comm/shm_communicator.h"

#include <cerrno>
#include <cstring>
#include <system_error>

#include <fmt/format.h>
#include <poll.h>

#include <fsdp/error.h>

#include "comm/peer_communicator.h"
#include "comm/shared_memory.h"
#include "comm/unix_socket.h"

namespace fsdp {
namespace {

// Each allocation is one memfd without a name; rank 0 sends it over its sockets and every rank maps it. The kernel frees
// it when the last rank has unmapped it or died.
class ShmMemory final : public SharedMemory {
 public:
  ShmMemory(Meeting meeting, int rank)
      : meeting_(std::move(meeting)), staging_(staging_region(*meeting_.control)), rank_(rank) {}

  ControlBlock& control() override { return *meeting_.control; }
  const PeerRegion& staging() override { return staging_; }

  void offer(std::size_t bytes) override {
    offered_ = make_memfd(mapped_bytes(bytes, meeting_.control->world_size()));
    const int fd = offered_.get();
    for (std::size_t peer = 1; peer < meeting_.links.size(); ++peer) {
      const Sent sent = send_message(meeting_.links[peer], "memory", {&fd, 1});
      // A closed link is a dead peer: the meeting that follows says so. Nobody takes anything out before that meeting.
      if (sent == Sent::kTryAgain) throw std::system_error(ETOOMANYREFS, std::generic_category(), "sendmsg");
    }
  }

  std::shared_ptr<const PeerRegion> collect(std::size_t bytes) override {
    const UniqueFd memfd = rank_ == 0 ? std::move(offered_) : take_offer();
    const int ranks = meeting_.control->world_size();
    const auto memory = std::make_shared<const MappedMemory>(memfd, mapped_bytes(bytes, ranks));
    return mapped_region(memory, bytes, ranks);
  }

  void die() override {
    throw InvalidArgument("Fault::kDeath: ranks of shm that are threads die together; use backend thread or tcp",
                          rank_);
  }

  std::vector<int> ended() const override {
    std::vector<pollfd> fds;
    for (const UniqueFd& process : meeting_.processes) fds.push_back({process.get(), POLLIN, 0});
    std::vector<int> ranks;
    if (::poll(fds.data(), fds.size(), 0) <= 0) return ranks;
    for (std::size_t rank = 0; rank < fds.size(); ++rank) {
      if (fds[rank].revents != 0) ranks.push_back(static_cast<int>(rank));
    }
    return ranks;
  }

 private:
  UniqueFd take_offer() {
    UniqueFd newest;
    // Before the newest there may be offers of allocations that then failed on another rank.
    while (auto message = receive_message(meeting_.links[0])) newest = std::move(message->fds.at(0));
    if (!newest) throw std::system_error(EPROTO, std::generic_category(), "rank 0 sent no memory");
    return newest;
  }

  Meeting meeting_;
  const PeerRegion staging_;
  const int rank_;
  UniqueFd offered_;  // rank 0's, from offer to collect
};

}  // namespace

std::shared_ptr<PeerCommunicator> make_shm_communicator(const MeetingPlace& place) {
  try {
    auto memory = std::make_unique<ShmMemory>(meet_at(place), place.rank);
    return std::make_shared<PeerCommunicator>(std::move(memory),
                                              PeerCommunicator::Options{"shm", place.rank, place.timeout});
  } catch (const std::system_error& error) {
    throw CommunicationError(
        fmt::format("rendezvous at {} failed on rank {} of {}: {}; check the folder, its permissions and the limit "
                    "on open files",
                    place.socket.string(), place.rank, place.world_size, error.what()),
        place.rank);
  }
}

}  // namespace fsdp
