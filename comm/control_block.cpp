#include "comm/control_block.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

namespace fsdp {
namespace {

constexpr std::size_t kPageBytes = 4096;

std::size_t staging_offset(int world_size) {
  const std::size_t bytes = sizeof(ControlBlock) + static_cast<std::size_t>(world_size) * sizeof(RankSlot);
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace

std::string_view name_of(Operation operation) {
  switch (operation) {
    case Operation::kNone: return "no collective";
    case Operation::kAllocate: return "allocate";
    case Operation::kAllocateBoard: return "allocate_board";
    case Operation::kAllGather: return "all_gather";
    case Operation::kReduceScatter: return "reduce_scatter";
    case Operation::kAllReduce: return "all_reduce";
    case Operation::kBroadcast: return "broadcast";
    case Operation::kBarrier: return "barrier";
    case Operation::kGather: return "gather";
    case Operation::kReduce: return "reduce";
    case Operation::kRead: return "read";
    case Operation::kWaitUntil: return "wait_until";
    case Operation::kCheck: return "check";
  }
  return "";
}

std::size_t ControlBlock::bytes_for(int world_size) {
  return staging_offset(world_size) + static_cast<std::size_t>(world_size) * 2 * kStagingBytes;
}

ControlBlock& ControlBlock::create(std::span<std::byte> memory, int world_size, bool mirrored) {
  auto* block = new (memory.data()) ControlBlock(world_size, mirrored);
  std::uninitialized_default_construct_n(reinterpret_cast<RankSlot*>(block + 1), world_size);
  return *block;
}

ControlBlock& ControlBlock::attach(std::span<std::byte> memory) {
  return *std::launder(reinterpret_cast<ControlBlock*>(memory.data()));
}

RankSlot& ControlBlock::slot(int rank) { return *std::launder(reinterpret_cast<RankSlot*>(this + 1) + rank); }

const RankSlot& ControlBlock::slot(int rank) const {
  return *std::launder(reinterpret_cast<const RankSlot*>(this + 1) + rank);
}

std::byte* ControlBlock::staging(int rank) {
  return reinterpret_cast<std::byte*>(this) + staging_offset(world_size_) +
         static_cast<std::size_t>(rank) * 2 * kStagingBytes;
}

void ControlBlock::arrive(int rank, std::uint64_t meeting) {
  slot(rank).arrived.store(meeting);
  if (mirrored_) {
    if (all_arrived(meeting)) meeting_bell.ring();
    return;
  }
  // Nobody comes to meeting n+1 before meeting n is complete, so the sum alone tells the last one.
  const auto world_size = static_cast<std::uint64_t>(world_size_);
  if (arrivals_.fetch_add(1) + 1 == meeting * world_size) meeting_bell.ring();
}

bool ControlBlock::all_arrived(std::uint64_t meeting) const {
  if (mirrored_) {
    // The news of a peer's next meeting may be here before that of a third one's last.
    for (int rank = 0; rank < world_size_; ++rank) {
      if (slot(rank).arrived.load() < meeting) return false;
    }
    return true;
  }
  return arrivals_.load(std::memory_order_acquire) >= meeting * static_cast<std::uint64_t>(world_size_);
}

bool ControlBlock::abort(int culprit, std::string_view reason) noexcept {
  auto expected = AbortState::kNone;
  const bool first = abort_state_.compare_exchange_strong(expected, AbortState::kWriting);
  if (first) {
    culprit_ = culprit;
    reason_bytes_ = static_cast<std::uint32_t>(std::min(reason.size(), sizeof(reason_)));
    std::memcpy(reason_, reason.data(), reason_bytes_);
    abort_state_.store(AbortState::kSet);
  }
  meeting_bell.ring();
  doorbell.ring();
  return first;
}

}  // namespace fsdp
