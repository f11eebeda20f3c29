// Ranks as threads of this process, for tests: the library's own and its users'.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <fsdp/context.h>

namespace fsdp {

// What is to go wrong, or slow.
struct Fault {
  enum class Kind {
    kDelay,       // the call comes later
    kThrow,       // the call throws CommunicationError on this rank, and so does every other rank's, as one thrown does
    kDeath,       // the rank is gone from here on, as a process that is killed; the others see it. Not over shm
    kCorruption,  // calls that give bytes: the lowest bit of the first byte that this rank gets is the other one
    kNoMemory,    // `allocate` and `allocate_board`: no memory on this rank, so MemoryError on all of them
  };
  Kind kind = Kind::kDelay;
  // The name of a call of Communicator that is recorded and that the kind can happen in ("gather", "all_reduce",
  // "wait_until", ...), or "" = any of those.
  std::string operation = {};
  int rank = -1;                       // -1 = every rank
  int after = 0;                       // matching calls of that rank to let pass first
  int count = 1;                       // how many matching calls are hit after those; -1 = all
  std::chrono::milliseconds delay{0};  // kDelay only
};
using FaultPlan = std::vector<Fault>;

// One call of a communicator, as recorded. Times are steady_clock nanoseconds.
struct CommunicatorRecord {
  std::string operation = {}, label = {};
  std::size_t bytes = 0;  // bytes written by this rank
  const void* output = nullptr;
  std::int64_t begin_ns = 0, end_ns = 0;
};

struct RunRanksOptions {
  // thread | shm | tcp. The ranks are threads with each; shm meets and maps as processes do, tcp exchanges all bytes over
  // loopback connections.
  std::string backend = "thread";
  std::chrono::milliseconds timeout{60'000};
  FaultPlan faults = {};
  // If set: called with (rank, record) after each communicator call but ring, abort and check, from the calling
  // thread.
  std::function<void(int, const CommunicatorRecord&)> on_record = {};
};

// Runs body(context) on `world_size` threads, one rank each. When one throws, the group is aborted; all are joined and
// the first error (by time) is rethrown: an fsdp::Error keeps its type and id, with "rank N: " before its text; any
// other exception is rethrown as it is. Throws InvalidArgument for a world size that is not in [1, 128], a timeout
// that is not positive, an unknown backend, or a fault that cannot happen (another operation, a rank that there is none of). Thread ranks share LibTorch's default generator.
void run_ranks(int world_size, const std::function<void(Context)>& body, const RunRanksOptions& options = {});

}  // namespace fsdp
