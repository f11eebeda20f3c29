#include "comm/thread_communicator.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <system_error>

#include <unistd.h>

#include "comm/peer_communicator.h"
#include "comm/shared_memory.h"

namespace fsdp {
namespace {

// What the threads of a group share.
struct ThreadGroup {
  explicit ThreadGroup(int world_size)
      : memory(ControlBlock::bytes_for(world_size)), control(ControlBlock::create(memory.span(), world_size)) {
    for (int rank = 0; rank < world_size; ++rank) control.slot(rank).pid = ::getpid();
  }

  MappedMemory memory;
  ControlBlock& control;
  std::array<std::atomic<bool>, kMaxWorldSize> dead{};
  std::weak_ptr<const PeerRegion> offered;  // weak: the ranks' handles alone keep a segment
};

class ThreadMemory final : public SharedMemory {
 public:
  ThreadMemory(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), staging_(staging_region(group_->control)), rank_(rank) {}

  ControlBlock& control() override { return group_->control; }
  const PeerRegion& staging() override { return staging_; }

  void offer(std::size_t bytes) override {
    const auto memory = std::make_shared<const MappedMemory>(mapped_bytes(bytes, group_->control.world_size()));
    own_offer_ = mapped_region(memory, bytes, group_->control.world_size());
    group_->offered = own_offer_;
  }

  std::shared_ptr<const PeerRegion> collect(std::size_t) override {
    std::shared_ptr<const PeerRegion> region = group_->offered.lock();
    own_offer_.reset();
    if (!region) throw std::system_error(ENOMEM, std::generic_category(), "the offered memory is gone");
    return region;
  }

  void die() override { group_->dead[static_cast<std::size_t>(rank_)] = true; }

  std::vector<int> ended() const override {
    std::vector<int> ranks;
    for (int rank = 0; rank < group_->control.world_size(); ++rank) {
      if (group_->dead[static_cast<std::size_t>(rank)]) ranks.push_back(rank);
    }
    return ranks;
  }

 private:
  std::shared_ptr<ThreadGroup> group_;
  const PeerRegion staging_;
  const int rank_;
  std::shared_ptr<const PeerRegion> own_offer_;  // rank 0's, from offer to collect
};

}  // namespace

std::vector<std::shared_ptr<PeerCommunicator>> make_thread_communicators(int world_size,
                                                                         std::chrono::milliseconds timeout) {
  const auto group = std::make_shared<ThreadGroup>(world_size);
  std::vector<std::shared_ptr<PeerCommunicator>> communicators;
  for (int rank = 0; rank < world_size; ++rank) {
    communicators.push_back(std::make_shared<PeerCommunicator>(std::make_unique<ThreadMemory>(group, rank),
                                                               PeerCommunicator::Options{"thread", rank, timeout}));
  }
  return communicators;
}

}  // namespace fsdp
