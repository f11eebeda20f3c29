// Bytes of one rank by purpose, and the plan they follow from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

// Persistent bytes are those of the engine's own buffers, padding included.
struct MemoryReport {
  std::size_t parameter_shard_bytes = 0;  // whole parameters where the strategy keeps them
  std::size_t master_bytes = 0;           // fp32 shards beside 16-bit parameters
  std::size_t gradient_shard_bytes = 0;   // whole gradients where the strategy keeps them
  std::size_t no_sync_bytes = 0;          // whole gradients within no_sync(); 0 before the first scope
  std::size_t optimizer_bytes = 0;
  std::size_t arena_bytes = 0;          // slots, allocated once
  std::size_t communication_bytes = 0;  // mailboxes
  std::size_t resident_bytes = 0;       // full parameters in the arena (and overflow) at this moment
  std::size_t held_gradient_bytes = 0;  // full gradients not yet packed, at this moment
  std::size_t peak_overflow_bytes = 0;  // beside the arena, since shard()
  std::int64_t overflows = 0;
  std::size_t total_bytes() const {
    return parameter_shard_bytes + master_bytes + gradient_shard_bytes + no_sync_bytes + optimizer_bytes + arena_bytes +
           communication_bytes;
  }
};

struct UnitPlan {
  std::string name;  // dotted module name; "(root)" for parameters of no unit
  std::int64_t numel = 0, trainable_numel = 0;
  std::size_t parameter_bytes = 0;    // gathered
  std::string strategy, param_dtype;  // "kFullShard", "BF16": of what was fp32
  int shard_group = 1;
};

// The resolved options and what follows from them.
struct Plan {
  int world_size = 1, prefetch = 1, slots = 0, intra_op_threads = 1;  // bits depend on intra_op_threads
  std::string backend, backend_reason, units_by, dispatch_key;
  std::vector<UnitPlan> units;
  std::size_t slot_bytes = 0;
  MemoryReport predicted;             // total_bytes() is the engine's peak without activations
  std::size_t unsharded_bytes = 0;    // parameters + gradients + optimizer state of plain LibTorch
  std::vector<std::string> timeline;  // unit runs of the plan in use; empty before the first step is over
  std::string to_string() const;      // a table for people
  std::string to_json() const;
};

}  // namespace fsdp
