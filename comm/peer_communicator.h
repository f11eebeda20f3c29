// The Communicator of ranks that can read each other's memory, in place or by messages: a backend gives it that memory,
// all the rest is shared, so that backends agree bit for bit.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include <sys/types.h>

#include <fsdp/communicator.h>

#include "comm/mapped_memory.h"
#include "comm/ordered_sum.h"
#include "comm/peer_group.h"
#include "comm/peer_reader.h"

namespace fsdp {

class PeerCommunicator final : public Communicator {
 public:
  struct Options {
    std::string backend;
    int rank = 0;
    std::chrono::milliseconds timeout{};  // positive
  };
  PeerCommunicator(std::unique_ptr<PeerMemory> memory, const Options& options);
  // Leaves the group; while an exception unwinds this rank, aborts it.
  ~PeerCommunicator() override;

  int rank() const override { return group_.rank(); }
  int world_size() const override { return group_.world_size(); }
  const std::string& backend() const override { return backend_; }
  std::chrono::milliseconds timeout() const override { return group_.timeout(); }

  std::unique_ptr<Segment> allocate(std::size_t bytes) override;
  std::unique_ptr<Board> allocate_board(int words) override;
  void all_gather(std::span<const std::byte> input, std::span<std::byte> output) override;
  void reduce_scatter(const std::byte* input, std::byte* output, std::int64_t numel, DType dtype) override;
  void all_reduce(std::byte* data, std::int64_t numel, DType dtype, ReduceOp op) override;
  void broadcast(std::span<std::byte> data, int root) override;
  void barrier() override;
  void gather(const GatherRequest& request) override;
  void reduce(const ReduceRequest& request) override;
  void read(const Segment& source, int rank, std::size_t offset, std::span<std::byte> output) override;
  void wait_until(const std::function<bool()>& ready, std::string_view what) override;
  bool awaits(int rank, int other) const override { return group_.awaits(rank, other); }
  void ring() override;
  void abort(const std::string& reason) noexcept override;
  void check() override;
  void report_progress(const Progress& progress) override;

  // PeerGroup::set_crash_folder.
  void set_crash_folder(const std::filesystem::path& folder) { group_.set_crash_folder(folder); }

  // For faults that are injected. This rank is gone without a word; the others see it, and it can do nothing any more.
  // Throws InvalidArgument where a rank cannot die alone.
  void die();
  bool is_dead() const { return dead_; }
  // This rank's part of its next allocation fails.
  void fail_next_allocation() { allocation_fails_ = true; }

 private:
  // One meeting of all ranks at the same call: returns its number, whose half of every staging area may be read until the
  // next one. Throws InvalidArgument on every rank if the calls differ.
  std::uint64_t meet(const Call& call, int error = 0);
  // Where the coming meeting's data goes. After a failed meeting a peer may still read the one before it, whose half this would be, so
  // an abort is looked for before anything is written.
  std::byte* own_staging(Operation operation) {
    group_.throw_if_aborted({operation});
    return group_.control().staging(rank()) + half_of(group_.next_meeting());
  }
  static std::size_t half_of(std::uint64_t meeting) { return meeting % 2 * kStagingBytes; }
  // A copy of what `peer` has staged for a meeting.
  PeerCopy staged(int peer, std::uint64_t meeting, std::span<std::byte> target, std::size_t offset = 0) {
    return {&memory_->staging(), peer, half_of(meeting) + offset, target};
  }
  void throw_if_calls_differ(std::uint64_t meeting);
  // The meeting that ends a step of allocate: MemoryError on every rank if a rank's step failed with an errno.
  void meet_after(const Call& call, int error);
  using Collect = std::function<std::shared_ptr<const PeerRegion>(std::size_t bytes)>;
  std::shared_ptr<const PeerRegion> allocate_region(const Call& call, const Collect& collect);
  void fold_staged(const Call& call, std::uint64_t meeting, std::size_t offset, const OrderedFold& fold);
  void fold_chunk(const Call& call, std::byte* data, std::int64_t numel, ReduceOp op, DType dtype);

  const std::string backend_;
  const pid_t owner_;     // a forked child must not leave in the name of its parent
  const int exceptions_;  // in flight when this was made
  std::unique_ptr<PeerMemory> memory_;
  PeerGroup group_;
  PeerReader reader_;
  std::atomic<bool> dead_{false}, allocation_fails_{false};
};

}  // namespace fsdp
