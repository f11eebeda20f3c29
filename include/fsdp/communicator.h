// What the engine asks of the ranks: memory that peers can read, collectives over raw spans, one-sided reads, and
// waits that end when a peer is gone. Backends: thread (ranks are threads of one process), shm (processes of one
// host), tcp (processes of any hosts).
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

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fsdp/dtype.h>

namespace fsdp {

// Memory of the same size on every rank, each part readable by all of them with gather, reduce and read. All parts stay
// readable as long as this handle lives; the memory is freed when every rank's is gone. Aligned to a page; zero when
// made. The caller orders writes and peers' reads (a barrier, or a word of a Board).
class Segment {
 public:
  virtual ~Segment() = default;
  std::size_t bytes() const { return local_.size(); }
  std::span<std::byte> local() const { return local_; }

 protected:
  explicit Segment(std::span<std::byte> local) : local_(local) {}

 private:
  std::span<std::byte> local_;
};

// Words that each rank posts for all to see. Zero when made. Any thread; `word` costs a load.
class Board {
 public:
  virtual ~Board() = default;
  // The newest of `rank`'s word that has come here. Words that a rank posted one after the other, and what it wrote to
  // its segments before, are seen in that order (acquire). REQUIRES 0 <= rank < world size and 0 <= index < words.
  std::uint64_t word(int rank, int index) const {
    return parts_[static_cast<std::size_t>(rank)][index].load(std::memory_order_acquire);
  }
  // Sets words index, index + 1, ... of this rank, in this order, and wakes every rank's wait_until. Never waits. The
  // caller sees to it that no two threads post the same word at once.
  virtual void post(int index, std::span<const std::uint64_t> words) = 0;
  void post(int index, std::uint64_t word) { post(index, std::span(&word, 1)); }

 protected:
  explicit Board(std::vector<std::atomic<std::uint64_t>*> parts) : parts_(std::move(parts)) {}
  std::atomic<std::uint64_t>* part(int rank) const { return parts_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<std::atomic<std::uint64_t>*> parts_;  // by rank
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

// Where a rank's input of a reduction lies: in its part of a segment, or in this rank's own memory. Neither = zeros.
struct ReduceInput {
  const Segment* source = nullptr;
  std::size_t offset = 0;  // bytes, of the first element that this rank sums
  const std::byte* local = nullptr;
};

// One rank's share of a reduce-scatter whose inputs are read where they lie:
//   output[i] (=|+=) (input[0][i] + input[1][i] + ... + input[W-1][i]) / divisor
// summed in rank order, in fp32 for fp32, bf16 and fp16, in their own type for fp64 and integers. At world size 1 with
// divisor 1 the result is bit-equal to the input.
struct ReduceRequest {
  std::span<const ReduceInput> inputs = {};  // one per rank
  std::int64_t numel = 0;
  DType input_dtype = DType::kFloat32;
  std::byte* output = nullptr;  // fp32 where input_dtype is fp32, bf16 or fp16; else input_dtype
  bool accumulate = false;      // += instead of =
  bool in_order = false;        // the output is the first term instead: ((output + input[0]) + input[1]) + ...
  int divisor = 1;
  std::string_view label = {};
};

// How far a rank's training has come; -1 = not known.
struct Progress {
  std::int64_t step = -1;        // being made
  std::int64_t saved_step = -1;  // the last that a checkpoint holds
};

// Outlives the segments and boards that it has allocated.
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
  // Collective: every rank asks for the same number of words. REQUIRES words >= 0. Throws as allocate does.
  virtual std::unique_ptr<Board> allocate_board(int words) = 0;

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

  // Blocks until `ready()` is true. `ready` reads words of a board, or atomics of this process; it is called again after
  // every post of any rank, every ring() of this one, and at least each 50 ms; it must be cheap and must not throw.
  // `what` names the wait in errors ("reduce of layers.3").
  virtual void wait_until(const std::function<bool()>& ready, std::string_view what) = 0;
  // `rank` is in a collective that `other` has not come to yet. A hint for finding ranks that wait for each other: it
  // may have changed by the time it is read, but is not missed while it lasts. No call of this kind waits.
  virtual bool awaits(int rank, int other) const = 0;
  // Wakes this rank's wait_until. Call after a store (release) to an atomic that another thread of it may wait for.
  virtual void ring() = 0;

  // First caller of any rank sets the reason; every wait of every rank then throws it.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Throws if any rank has aborted or is known dead; else returns at once.
  virtual void check() = 0;
  // For the messages of this rank and its peers. Any thread; never waits.
  virtual void report_progress(const Progress& progress) = 0;
};

}  // namespace fsdp
