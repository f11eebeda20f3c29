#include "comm/control_block.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include <fmt/format.h>

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

std::string describe(const Activity& activity) {
  if (activity.operation == Operation::kWaitUntil && !activity.label.empty()) return std::string(activity.label);
  const std::string_view name = name_of(activity.operation);
  return activity.label.empty() ? std::string(name) : fmt::format("{} of {}", name, activity.label);
}

RankStatus::Label RankStatus::end_of(std::string_view label) {
  Label end{};
  const std::size_t bytes = std::min(label.size(), end.size());
  label.copy(end.data(), bytes, label.size() - bytes);
  return end;
}

std::string_view RankStatus::text_of(const Label& label) {
  return {label.data(), static_cast<std::size_t>(std::find(label.begin(), label.end(), '\0') - label.begin())};
}

void RankStatus::set_activity(const Activity& activity) {
  const Label label = end_of(activity.label);
  words_[2].store(static_cast<std::uint64_t>(activity.operation), std::memory_order_relaxed);
  for (std::size_t i = 0; i < kLabelBytes / sizeof(std::uint64_t); ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, label.data() + i * sizeof(word), sizeof(word));
    words_[3 + i].store(word, std::memory_order_relaxed);
  }
}

std::string RankStatus::activity() const {
  const auto all = words();
  const auto operation = static_cast<Operation>(
      std::min<std::uint64_t>(all[2], static_cast<std::uint64_t>(Operation::kCheck)));
  Label label;
  std::memcpy(label.data(), all.data() + 3, kLabelBytes);
  return describe({operation, text_of(label)});
}

void RankStatus::set_progress(const Progress& progress) {
  words_[0].store(static_cast<std::uint64_t>(progress.step + 1), std::memory_order_relaxed);
  words_[1].store(static_cast<std::uint64_t>(progress.saved_step + 1), std::memory_order_relaxed);
}

void RankStatus::set_awaited(int rank) {
  words_[kWords - 1].store(static_cast<std::uint64_t>(rank + 1), std::memory_order_relaxed);
}

int RankStatus::awaited() const { return static_cast<int>(words_[kWords - 1].load(std::memory_order_relaxed)) - 1; }

Progress RankStatus::progress() const {
  const auto all = words();
  return {static_cast<std::int64_t>(all[0]) - 1, static_cast<std::int64_t>(all[1]) - 1};
}

std::array<std::uint64_t, RankStatus::kWords> RankStatus::words() const {
  std::array<std::uint64_t, kWords> words;
  for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
  return words;
}

void RankStatus::set_words(std::span<const std::uint64_t, kWords> words) {
  for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
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
    reason.copy(reason_, reason_bytes_);
    abort_state_.store(AbortState::kSet);
  }
  meeting_bell.ring();
  doorbell.ring();
  return first;
}

}  // namespace fsdp
