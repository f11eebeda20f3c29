// `fsdp bench comm`: how fast the ranks of a job exchange bytes, in the columns of nccl-tests.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <fsdp/context.h>

namespace fsdp {

struct BenchOptions {
  std::vector<std::string> operations;                  // of kBenchOperations; empty = all
  std::size_t begin = 8, end = std::size_t{128} << 20;  // bytes of the largest buffer of the operation
  int factor = 4;                                       // from one size to the next
  int iterations = 0;                                   // 0 = as many as take about 0.2 s, from 3 to 1000
  bool json = false;
};

// The first two are what the engine does: one-sided, from memory that peers can read.
inline constexpr const char* kBenchOperations[] = {"gather",         "reduce",     "all_gather",
                                                   "reduce_scatter", "all_reduce", "broadcast"};

// Collective: every rank calls it with the same options. Rank 0 prints. Returns how many elements were wrong on any rank.
// Throws InvalidArgument for options that cannot be, and what the communicator throws.
std::int64_t bench_comm(Context context, const BenchOptions& options);

// Collective: each operation once, at this size; how many elements were wrong on any rank.
std::int64_t count_wrong_exchanges(const Context& context, std::size_t bytes);

}  // namespace fsdp
