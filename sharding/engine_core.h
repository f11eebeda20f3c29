// What the parts of one engine share. Everything below `mutex` is guarded by it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <fsdp/context.h>

#include "sharding/communication_stream.h"
#include "sharding/reduce_mailbox.h"
#include "sharding/sharded_model.h"
#include "sharding/slots.h"
#include "sharding/timeline.h"

namespace fsdp {

// Bytes outside of autograd, zeroed.
at::Tensor zeroed_bytes(std::size_t bytes);

struct EngineCore {
  // Collective.
  EngineCore(const Context& the_context, std::vector<CutUnit> units, const std::vector<UnitPolicy>& policies,
             const ShardOptions& options, StorageOwner* owner);

  Communicator& communicator() const { return context.communicator(); }
  const UnitLayout& unit(int index) const { return model.units[static_cast<std::size_t>(index)]; }
  const std::string& unit_name(int index) const { return unit(index).name; }
  // This rank's own share of a group.
  std::byte* parameter_shard(const FlatGroup& group) const {
    return parameters->local().data() + group.parameter_offset + share_of(group) * group.parameter_stride;
  }
  std::byte* gradient_shard(const FlatGroup& group) const { return gradients->local().data() + gradient_offset(group); }
  std::size_t gradient_offset(const FlatGroup& group) const {
    return group.gradient_offset + share_of(group) * group.gradient_stride;
  }
  // What counts: NOTE [Master weights].
  std::byte* master_shard(const FlatGroup& group) const {
    return group.has_master() ? masters->local().data() + group.master_offset : parameter_shard(group);
  }
  // Puts a parameter's elements together from the owners of its shares, in memory order: `source` is one of the
  // segments below, share 0 of the group at `offset` and the next ones `stride` bytes further.
  void read_whole(const ShardedParameter& p, const Segment& source, std::size_t offset, std::size_t stride, DType dtype,
                  std::byte* output) const;
  // The mean gradient, of the gradient's type. REQUIRES that every rank has settled.
  at::Tensor whole_gradient(const ShardedParameter& p) const;
  // The elements of a parameter's share that this rank sums, as offsets in the share. The owners of a share hold the
  // same gradients: each counts its own part.
  ElementRange summed_here(const ShardedParameter& p) const;
  // Rounds the master into the parameters, where there is one.
  void refresh_parameters(const FlatGroup& group) const;
  // "gather of layers.3 (rank 1, step 12)": for errors and waits.
  std::string describe(std::string_view operation, int unit) const;
  // A wait for a slot to drain need not go on: it has drained, or an overflow buffer is to be taken.
  bool wait_is_over(int slot, std::chrono::steady_clock::time_point began) const;
  // A copy of so little costs less than to wake the engine's thread and to wait for it.
  bool is_small(const UnitLayout& layout) const { return layout.bytes <= kSmallBytes; }
  // Throws the first failure of the stream or of any rank.
  void check() const;
  // Blocks until `done`, with `lock` (of `mutex`) let go meanwhile. Where a wait throws, the group is aborted: what this
  // rank has said that it waits for, and slots that it has taken, mean nothing any more.
  template <class Done>
  void wait(std::unique_lock<std::mutex>& lock, const Done& done) {
    while (!done()) {
      check();
      changed.wait_for(lock, std::chrono::milliseconds(50));
    }
  }

  Context context;
  int prefetch;
  bool ordered_sums, update_in_backward;
  ShardedModel model;
  std::unique_ptr<Segment> parameters;  // each rank's shares of all groups, or all shares: NOTE [Strategies]
  std::unique_ptr<Segment> masters;     // fp32 shares of groups that are computed in 16 bits
  std::unique_ptr<Segment> gradients;   // of all trainable groups, as `parameters`
  ReduceMailbox mailbox;
  Slots slots;
  std::atomic<std::int64_t> step{0};
  std::atomic<std::int64_t> saved_step{-1};  // the last that a checkpoint holds

  std::mutex mutex;
  std::condition_variable changed;  // a job of the stream is over
  Timeline timeline;

  CommunicationStream stream;  // last: its thread ends before the rest goes

 private:
  static constexpr std::size_t kSmallBytes = 32768;
  std::size_t share_of(const FlatGroup& group) const {
    return static_cast<std::size_t>(model.unit_of(group).mesh.share());
  }
};

}  // namespace fsdp
