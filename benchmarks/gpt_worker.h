// The training that the benchmarks measure: the GPT of examples/train_gpt on made-up text. No torch header.
#pragma once

#include "benchmarks/worker_group.h"
#include "examples/train_gpt/config.h"

namespace fsdp {

struct Workload {
  gpt::Config model;
  std::int64_t rows = 8;  // per step over all ranks
  int threads = 1;        // per rank
};

// Each takes its place in the worker that calls it, with the same weights at the start and the same batches.
Block prepare_plain(const Workload& workload);    // torch::optim::AdamW and clip_grad_norm_, one process
Block prepare_sharded(const Workload& workload);  // fsdp::shard at whatever world size it finds itself in

// Parameters of the model, and of its largest unit, which is one block or what lies outside of the blocks.
std::int64_t model_numel(const gpt::Config& config);
std::int64_t largest_unit_numel(const gpt::Config& config);

}  // namespace fsdp
