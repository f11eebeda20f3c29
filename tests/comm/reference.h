// Elements and reductions written the slow and obvious way, to hold the library's against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <fsdp/communicator.h>

namespace fsdp::reference {

using Bytes = std::vector<std::byte>;

// `numel` elements that differ by rank and index; floats of mixed sign and magnitude, so that another order of summation
// shows in the bits.
Bytes elements(DType dtype, int rank, std::int64_t numel);

// The inputs folded in rank order, one element at a time; sums of floats in fp32 (fp64 in fp64), rounded once.
Bytes fold(DType dtype, ReduceOp op, std::span<const Bytes> inputs);

// `base` (if not empty) plus the sum of the inputs divided by `divisor`; fp32 for fp32, bf16 and fp16. An empty input
// counts as zeros.
Bytes reduce(DType dtype, std::span<const Bytes> inputs, std::int64_t numel, int divisor, const Bytes& base);

}  // namespace fsdp::reference
