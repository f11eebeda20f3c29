// Reductions over ranks whose result does not depend on the machine, the backend or the number of cores: always in rank
// order, in one accumulator type, without fused multiply-add.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <fsdp/communicator.h>

namespace fsdp {

// The levels of the x86-64 ABI that the loops are compiled for: none, AVX2 and AVX-512. REQUIRES one that the CPU has.
enum class InstructionSet { kBaseline, kV3, kV4 };
InstructionSet best_instruction_set();

// output[i] (=|+=) (input[0][i] + ... + input[W-1][i]) / divisor, as ReduceRequest defines it; a null input is zeros.
struct OrderedSum {
  std::span<const std::byte* const> inputs = {};  // one per rank
  std::int64_t numel = 0;
  DType input_dtype = DType::kFloat32;
  std::byte* output = nullptr;  // fp32 where input_dtype is fp32, bf16 or fp16; else input_dtype
  bool accumulate = false;
  bool in_order = false;
  int divisor = 1;
};
// What one element of the output takes.
std::size_t reduced_size_of(DType input_dtype);
void ordered_sum(const OrderedSum& sum, InstructionSet set = best_instruction_set());

// output[i] = input[0][i] op ... op input[W-1][i], in and out of `dtype`. Sums of fp16, bf16 and fp32 are taken in fp32
// and rounded once. Integers wrap; sums of bools are `or`; a NaN makes max and min NaN. output may be one of the inputs.
struct OrderedFold {
  std::span<const std::byte* const> inputs;
  std::int64_t numel = 0;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::byte* output = nullptr;
};
void ordered_fold(const OrderedFold& fold, InstructionSet set = best_instruction_set());

}  // namespace fsdp
