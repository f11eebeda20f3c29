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

ControlBlock& ControlBlock::create(std::span<std::byte> memory, int world_size) {
  auto* block = new (memory.data()) ControlBlock(world_size);
  std::uninitialized_default_construct_n(reinterpret_cast<RankSlot*>(block + 1), world_size);
  return *block;
}

ControlBlock& ControlBlock::attach(std::span<std::byte> memory) {
  return *std::launder(reinterpret_cast<ControlBlock*>(memory.data()));
}

RankSlot& ControlBlock::slot(int rank) { return *std::launder(reinterpret_cast<RankSlot*>(this + 1) + rank); }

std::byte* ControlBlock::staging(int rank, std::uint64_t meeting) {
  const auto half = static_cast<std::size_t>(rank) * 2 + meeting % 2;
  return reinterpret_cast<std::byte*>(this) + staging_offset(world_size_) + half * kStagingBytes;
}

void ControlBlock::arrive(int rank, std::uint64_t meeting) {
  slot(rank).arrived.store(meeting);
  // Nobody comes to meeting n+1 before meeting n is complete, so the sum alone tells the last one.
  const auto world_size = static_cast<std::uint64_t>(world_size_);
  if (arrivals_.fetch_add(1) + 1 == meeting * world_size) meeting_bell.ring();
}

bool ControlBlock::all_arrived(std::uint64_t meeting) const {
  return arrivals_.load(std::memory_order_acquire) >= meeting * static_cast<std::uint64_t>(world_size_);
}

void ControlBlock::abort(int culprit, std::string_view reason) noexcept {
  auto expected = AbortState::kNone;
  if (abort_state_.compare_exchange_strong(expected, AbortState::kWriting)) {
    culprit_ = culprit;
    reason_bytes_ = static_cast<std::uint32_t>(std::min(reason.size(), sizeof(reason_)));
    std::memcpy(reason_, reason.data(), reason_bytes_);
    abort_state_.store(AbortState::kSet);
  }
  meeting_bell.ring();
  doorbell.ring();
}

}  // namespace fsdp
