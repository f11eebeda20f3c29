// What the ranks of a group share besides their segments: who has arrived where, who has left, why the group was aborted,
// and a staging area per rank through which collectives of private memory pass.
//
//   | ControlBlock | slot 0 | slot 1 | ... | slot W-1 |pad| rank 0: half 0, half 1 | rank 1: half 0, half 1 | ...
//                                                         each half kStagingBytes, page aligned
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <fsdp/communicator.h>

#include "comm/bell.h"

namespace fsdp {

inline constexpr std::size_t kStagingBytes = std::size_t{2} << 20;
// What one SCM_RIGHTS message can hold, rounded down.
inline constexpr int kMaxWorldSize = 128;

enum class Operation : std::uint32_t {
  kNone,
  kAllocate,
  kAllocateBoard,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kBarrier,
  kGather,
  kReduce,
  kRead,
  kWaitUntil,
  kCheck,
};
std::string_view name_of(Operation operation);

// What a rank is about to do in a collective; all ranks must agree. `detail` is the dtype, reduction or root.
struct Call {
  Operation operation = Operation::kNone;
  std::uint32_t detail = 0;
  std::uint64_t bytes = 0;
  bool operator==(const Call&) const = default;
};

// What a rank is doing, for error texts: "gather of layers.3".
struct Activity {
  Operation operation = Operation::kNone;
  std::string_view label = {};
};
std::string describe(const Activity& activity);

// How far a rank has come, for the messages of its peers. Any thread; a text that is read while it changes may be a
// mixture.
class RankStatus {
 public:
  static constexpr std::size_t kWords = 9;
  static constexpr std::size_t kLabelBytes = 40;
  using Label = std::array<char, kLabelBytes>;

  // The end of a longer one, which tells units apart; filled up with '\0'.
  static Label end_of(std::string_view label);
  static std::string_view text_of(const Label& label);

  void set_activity(const Activity& activity);
  void set_progress(const Progress& progress);
  void set_awaited(int rank);    // that this one waits for; -1 = none, or not known
  std::string activity() const;  // the last one
  Progress progress() const;
  int awaited() const;
  // The same as words, to send and to take over.
  std::array<std::uint64_t, kWords> words() const;
  void set_words(std::span<const std::uint64_t, kWords> words);

 private:
  // Step + 1, saved step + 1, operation, label, awaited rank + 1.
  std::array<std::atomic<std::uint64_t>, kWords> words_{};
};

enum class Presence : std::uint32_t { kHere, kLeft };

struct alignas(64) RankSlot {
  std::atomic<std::uint64_t> arrived{0};  // how many meetings this rank has come to
  std::atomic<Presence> presence{Presence::kHere};
  RankStatus status;
  std::int32_t pid = 0;
  char host[64] = {};  // empty where all ranks are on one
  // Written before a meeting, read after it; meetings of odd and even number alternate, see NOTE [Two halves].
  Call calls[2];
  std::int32_t errors[2] = {0, 0};  // 0, or the errno of this rank's part of the call
};

// NOTE [Two halves] Rank A may write half h for meeting n+2 only when every peer has read half h of meeting n. A peer
// reads it between the meetings n and n+1, and A has come out of meeting n+1, so it has. One meeting per chunk is enough.
class ControlBlock {
 public:
  static std::size_t bytes_for(int world_size);
  // Builds the block in `memory` (zeroed, bytes_for(world_size) long, page aligned); the memory owns it. A mirrored one
  // is of one rank alone, which writes the others' slots as their news comes in.
  static ControlBlock& create(std::span<std::byte> memory, int world_size, bool mirrored = false);
  // The block that another process has built.
  static ControlBlock& attach(std::span<std::byte> memory);

  int world_size() const { return world_size_; }
  RankSlot& slot(int rank);
  const RankSlot& slot(int rank) const;
  std::byte* staging(int rank);  // both halves

  // Rank `rank` has come to meeting number `meeting` (1, 2, ...); the last to come rings meeting_bell.
  void arrive(int rank, std::uint64_t meeting);
  bool all_arrived(std::uint64_t meeting) const;

  // The first reason stays; both bells ring. `culprit` is the rank to blame. False if there was a reason already.
  bool abort(int culprit, std::string_view reason) noexcept;
  bool aborted() const { return abort_state_.load(std::memory_order_acquire) == AbortState::kSet; }
  // REQUIRES aborted().
  int culprit() const { return culprit_; }
  std::string_view reason() const { return {reason_, reason_bytes_}; }

  Bell meeting_bell;
  alignas(64) Bell doorbell;

 private:
  enum class AbortState : std::uint32_t { kNone, kWriting, kSet };

  ControlBlock(int world_size, bool mirrored) : world_size_(world_size), mirrored_(mirrored) {}

  alignas(64) std::atomic<std::uint64_t> arrivals_{0};  // of all ranks in all meetings
  alignas(64) std::atomic<AbortState> abort_state_{AbortState::kNone};
  std::int32_t culprit_ = -1;
  std::uint32_t reason_bytes_ = 0;
  char reason_[1024] = {};
  std::int32_t world_size_;
  bool mirrored_;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<Operation>::is_always_lock_free);

}  // namespace fsdp
