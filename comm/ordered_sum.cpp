#include "comm/ordered_sum.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "memory/half.h"

namespace fsdp {
namespace {

// Everything from here to `run` is always_inline, so that its three callers compile it for an instruction set each. CMake
// builds this file with -O3 -ffp-contract=off: the three then give the same bits.
#define FSDP_INLINE [[gnu::always_inline]] inline

// Elements per pass: the accumulator stays in the first-level cache while the inputs stream by.
constexpr std::int64_t kBlockNumel = 1024;
constexpr std::byte kZeros[kBlockNumel * sizeof(double)] = {};

using fsdp::widen;
enum class Bool : std::uint8_t {};
FSDP_INLINE std::uint8_t widen(Bool value) { return static_cast<std::uint8_t>(value); }

template <class T>
using SumOf = decltype(widen(T{}));

template <class T>
FSDP_INLINE T load(const std::byte* from, std::int64_t i) {
  T value;
  std::memcpy(&value, from + static_cast<std::size_t>(i) * sizeof(value), sizeof(value));
  return value;
}

template <class T>
FSDP_INLINE void store(std::byte* to, std::int64_t i, T value) {
  std::memcpy(to + static_cast<std::size_t>(i) * sizeof(value), &value, sizeof(value));
}

template <class T, ReduceOp op>
FSDP_INLINE SumOf<T> combine(SumOf<T> a, SumOf<T> b) {
  using Sum = SumOf<T>;
  if constexpr (op == ReduceOp::kMax) return a > b || a != a ? a : b;  // a != a: a NaN stays
  if constexpr (op == ReduceOp::kMin) return a < b || a != a ? a : b;
  if constexpr (std::is_same_v<T, Bool>) return a | b;
  if constexpr (std::is_integral_v<Sum>) {
    using Unsigned = std::make_unsigned_t<Sum>;  // wraps by definition
    return static_cast<Sum>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
  }
  return static_cast<Sum>(a + b);
}

// The elements [begin, begin + numel) of all inputs, folded in rank order; onto what `sum` holds, if it `continues`.
template <class T, ReduceOp op>
FSDP_INLINE void fold_block(std::span<const std::byte* const> inputs, std::int64_t begin, std::int64_t numel,
                            SumOf<T>* sum, bool continues = false) {
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    const std::byte* input = inputs[rank] ? inputs[rank] + static_cast<std::size_t>(begin) * sizeof(T) : kZeros;
    if (rank == 0 && !continues) {
      for (std::int64_t i = 0; i < numel; ++i) sum[i] = widen(load<T>(input, i));
    } else {
      for (std::int64_t i = 0; i < numel; ++i) {
        sum[i] = combine<T, op>(sum[i], widen(load<T>(input, i)));
      }
    }
  }
}

template <class T>
FSDP_INLINE void reduce_elements(const OrderedSum& request) {
  using Sum = SumOf<T>;
  alignas(64) Sum sum[kBlockNumel];
  using Quotient = std::conditional_t<std::is_integral_v<Sum>, std::int64_t, Sum>;  // 128 ranks do not fit an int8
  const auto divisor = static_cast<Quotient>(request.divisor);
  for (std::int64_t begin = 0; begin < request.numel; begin += kBlockNumel) {
    const std::int64_t numel = std::min(kBlockNumel, request.numel - begin);
    std::byte* output = request.output + static_cast<std::size_t>(begin) * sizeof(Sum);
    if (request.in_order) std::memcpy(sum, output, static_cast<std::size_t>(numel) * sizeof(Sum));
    fold_block<T, ReduceOp::kSum>(request.inputs, begin, numel, sum, request.in_order);
    // Not a multiplication by the inverse: that would round twice.
    if (request.divisor != 1) {
      for (std::int64_t i = 0; i < numel; ++i) sum[i] = static_cast<Sum>(sum[i] / divisor);
    }
    if (request.accumulate) {
      for (std::int64_t i = 0; i < numel; ++i) {
        store(output, i, combine<Sum, ReduceOp::kSum>(load<Sum>(output, i), sum[i]));
      }
    } else {
      std::memcpy(output, sum, static_cast<std::size_t>(numel) * sizeof(Sum));
    }
  }
}

template <class T, ReduceOp op>
FSDP_INLINE void fold_elements(const OrderedFold& fold) {
  alignas(64) SumOf<T> sum[kBlockNumel];
  for (std::int64_t begin = 0; begin < fold.numel; begin += kBlockNumel) {
    const std::int64_t numel = std::min(kBlockNumel, fold.numel - begin);
    fold_block<T, op>(fold.inputs, begin, numel, sum);
    for (std::int64_t i = 0; i < numel; ++i) store(fold.output, begin + i, narrow<T>(sum[i]));
  }
}

template <class T>
FSDP_INLINE void run_elements(const OrderedSum& sum) {
  reduce_elements<T>(sum);
}

template <class T>
FSDP_INLINE void run_elements(const OrderedFold& fold) {
  switch (fold.op) {
    case ReduceOp::kSum: return fold_elements<T, ReduceOp::kSum>(fold);
    case ReduceOp::kMax: return fold_elements<T, ReduceOp::kMax>(fold);
    case ReduceOp::kMin: return fold_elements<T, ReduceOp::kMin>(fold);
  }
}

template <class Work>
FSDP_INLINE void run(const Work& work, DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return run_elements<float>(work);
    case DType::kFloat64: return run_elements<double>(work);
    case DType::kFloat16: return run_elements<Half>(work);
    case DType::kBFloat16: return run_elements<BFloat16>(work);
    case DType::kInt64: return run_elements<std::int64_t>(work);
    case DType::kInt32: return run_elements<std::int32_t>(work);
    case DType::kInt16: return run_elements<std::int16_t>(work);
    case DType::kInt8: return run_elements<std::int8_t>(work);
    case DType::kUInt8: return run_elements<std::uint8_t>(work);
    case DType::kBool: return run_elements<Bool>(work);
  }
}

#undef FSDP_INLINE

template <class Work>
void run_baseline(const Work& work, DType dtype) {
  run(work, dtype);
}

template <class Work>
[[gnu::target("arch=x86-64-v3")]] void run_v3(const Work& work, DType dtype) {
  run(work, dtype);
}

template <class Work>
[[gnu::target("arch=x86-64-v4,prefer-vector-width=512")]] void run_v4(const Work& work, DType dtype) {
  run(work, dtype);
}

// Chosen here rather than by target_clones: its resolvers run before a sanitizer is ready for them.
template <class Work>
void run_with(InstructionSet set, const Work& work, DType dtype) {
  switch (set) {
    case InstructionSet::kBaseline: return run_baseline(work, dtype);
    case InstructionSet::kV3: return run_v3(work, dtype);
    case InstructionSet::kV4: return run_v4(work, dtype);
  }
}

}  // namespace

InstructionSet best_instruction_set() {
  if (__builtin_cpu_supports("x86-64-v4")) return InstructionSet::kV4;
  return __builtin_cpu_supports("x86-64-v3") ? InstructionSet::kV3 : InstructionSet::kBaseline;
}

std::size_t reduced_size_of(DType input_dtype) {
  return input_dtype == DType::kBFloat16 || input_dtype == DType::kFloat16 ? sizeof(float) : size_of(input_dtype);
}

void ordered_sum(const OrderedSum& sum, InstructionSet set) { run_with(set, sum, sum.input_dtype); }

void ordered_fold(const OrderedFold& fold, InstructionSet set) { run_with(set, fold, fold.dtype); }

}  // namespace fsdp
