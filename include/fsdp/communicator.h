// What the engine asks of the ranks: memory that peers can read, collectives over raw spans, one-sided reads, and
// waits that end when a peer is gone. Backends: thread (ranks are threads of one process), shm (processes of one
// host).
//
// Thread safety. The collectives of one communicator are called by one thread at a time, in the same order on every
// rank. `gather`, `reduce`, `read`, `wait_until` and `ring` are one-sided: any thread of a rank may call them at any
// time, beside a collective and beside each other. `abort` and `check` may be called from anywhere.
//
// Failure. Every call that waits throws CommunicationError within 50 ms of an abort by any rank, within 50 ms of the
// moment a peer's death can be seen, and at the latest after the context's timeout. The message names the rank, the
// operation and the remedy. After an abort every further call throws the same reason; the communicator is not usable
// again. A rank that destroys its communicator has left, and is not dead: the others may go on without it, but a
// collective that waits for it throws at once, and so does a wait_until soon after every peer has left. One that an
// exception unwinds aborts. Collective calls that differ between ranks are InvalidArgument on all of them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <fsdp/dtype.h>

namespace fsdp {

// Memory of the same size on every rank, each part readable by all of them. All parts stay readable as long as this
// handle lives; the memory is freed when every rank's is gone. Aligned to a page; zero when made.
class Segment {
 public:
  virtual ~Segment() = default;
  std::size_t bytes() const { return peer(0).size(); }
  std::span<std::byte> local() const { return peer(rank_); }
  // REQUIRES 0 <= rank < world size. The caller orders accesses (barrier, or an atomic in the segment).
  virtual std::span<std::byte> peer(int rank) const = 0;

 protected:
  explicit Segment(int rank) : rank_(rank) {}

 private:
  int rank_;
};

enum class ReduceOp { kSum, kMax, kMin };

// One all-gather read from the owners: output[i * shard_bytes ...] = source[offset + i * stride ... + shard_bytes] of
// rank first_rank + i, for each i below `ranks`.
struct GatherRequest {
  const Segment* source = nullptr;
  std::size_t offset = 0;  // bytes, the same on every rank
  std::size_t shard_bytes = 0;
  std::byte* output = nullptr;  // ranks * shard_bytes; may be where `source` has this rank's own share in place
  std::string_view label = {};  // unit name, for errors and records; outlives the call
  int first_rank = 0;
  int ranks = 0;           // 0 = all
  std::size_t stride = 0;  // bytes; 0 or shard_bytes
};

// One rank's share of a reduce-scatter whose inputs are read where they lie:
//   output[i] (=|+=) (input[0][i] + input[1][i] + ... + input[W-1][i]) / divisor
// summed in rank order, in fp32 for fp32, bf16 and fp16, in their own type for fp64 and integers. A null input counts
// as zeros. At world size 1 with divisor 1 the result is bit-equal to the input.
struct ReduceRequest {
  std::span<const std::byte* const> inputs = {};  // one pointer per rank, to the first element of this rank's share
  std::int64_t numel = 0;
  DType input_dtype = DType::kFloat32;
  std::byte* output = nullptr;  // fp32 where input_dtype is fp32, bf16 or fp16; else input_dtype
  bool accumulate = false;      // += instead of =
  bool in_order = false;        // the output is the first term instead: ((output + input[0]) + input[1]) + ...
  int divisor = 1;
  std::string_view label = {};
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual const std::string& backend() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;

  // Collective: every rank asks for the same number of bytes (else InvalidArgument on all of them). Throws
  // MemoryError.
  virtual std::unique_ptr<Segment> allocate(std::size_t bytes) = 0;

  // Collectives. Blocking; empty spans are legal and still synchronise.
  // all_gather: output.size() == world_size * input.size(); input may be the rank's own part of output (in place).
  virtual void all_gather(std::span<const std::byte> input, std::span<std::byte> output) = 0;
  // input holds world_size * numel elements, output numel of the same dtype. Sums in rank order, in fp32 for fp16,
  // bf16 and fp32 (rounded once at the end).
  virtual void reduce_scatter(const std::byte* input, std::byte* output, std::int64_t numel, DType dtype) = 0;
  virtual void all_reduce(std::byte* data, std::int64_t numel, DType dtype, ReduceOp op) = 0;
  virtual void broadcast(std::span<std::byte> data, int root) = 0;
  virtual void barrier() = 0;

  // One-sided: no peer takes part.
  virtual void gather(const GatherRequest& request) = 0;
  virtual void reduce(const ReduceRequest& request) = 0;
  // Copies peer `rank`'s bytes [offset, offset + output.size()) of `source`.
  virtual void read(const Segment& source, int rank, std::size_t offset, std::span<std::byte> output) = 0;

  // Blocks until `ready()` is true. `ready` reads atomics of a segment and is called again after every ring() of any
  // rank and at least each 50 ms; it must be cheap and must not throw. `what` names the wait in errors ("reduce of
  // layers.3").
  virtual void wait_until(const std::function<bool()>& ready, std::string_view what) = 0;
  // `rank` is in a collective that `other` has not come to yet. A hint for finding ranks that wait for each other: it
  // may have changed by the time it is read, but is not missed while it lasts. No call of this kind waits.
  virtual bool awaits(int rank, int other) const = 0;
  // Wakes every rank's wait_until. Call after a store (release) to an atomic that a peer may be waiting for.
  virtual void ring() = 0;

  // First caller of any rank sets the reason; every wait of every rank then throws it.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Throws if any rank has aborted or is known dead; else returns at once.
  virtual void check() = 0;
};

}  // namespace fsdp
