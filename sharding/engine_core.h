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
#include "sharding/mesh.h"
#include "sharding/reduce_mailbox.h"
#include "sharding/sharded_model.h"
#include "sharding/slots.h"
#include "sharding/timeline.h"

namespace fsdp {

// Bytes outside of autograd, zeroed.
at::Tensor zeroed_bytes(std::size_t bytes);

struct EngineCore {
  // Collective.
  EngineCore(const Context& the_context, std::vector<CutUnit> units, int shares, int the_prefetch, StorageOwner* owner);

  Communicator& communicator() const { return context.communicator(); }
  std::byte* parameter_shard(const FlatGroup& group) const { return parameters->local().data() + group.shard_offset; }
  std::byte* gradient_shard(const FlatGroup& group) const { return gradients->local().data() + group.state_offset; }
  const std::string& unit_name(int unit) const { return model.units[static_cast<std::size_t>(unit)].name; }
  // "gather of layers.3 (rank 1, step 12)": for errors and waits.
  std::string describe(std::string_view operation, int unit) const;
  // A wait for a slot to drain need not go on: it has drained, or an overflow buffer is to be taken.
  bool wait_is_over(int slot, std::chrono::steady_clock::time_point began) const;
  // Throws the first failure of the stream or of any rank.
  void check() const;
  // Blocks until `done`, with `lock` (of `mutex`) let go meanwhile.
  template <class Done>
  void wait(std::unique_lock<std::mutex>& lock, const Done& done) {
    while (!done()) {
      check();
      changed.wait_for(lock, std::chrono::milliseconds(50));
    }
  }

  Context context;
  Mesh mesh;
  int prefetch;
  ShardedModel model;
  std::unique_ptr<Segment> parameters;  // each rank's shards of all groups
  std::unique_ptr<Segment> gradients;   // of all trainable groups' gradients
  ReduceMailbox mailbox;
  Slots slots;
  std::atomic<std::int64_t> step{0};

  std::mutex mutex;
  std::condition_variable changed;  // a job of the stream is over
  Timeline timeline;

  CommunicationStream stream;  // last: its thread ends before the rest goes
};

}  // namespace fsdp
