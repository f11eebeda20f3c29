#include "comm/ordered_sum.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace fsdp {
namespace {

// Everything from here to `run` is always_inline, so that its three callers compile it for an instruction set each. CMake
// builds this file with -O3 -ffp-contract=off: the three then give the same bits.
#define FSDP_INLINE [[gnu::always_inline]] inline

// Elements per pass: the accumulator stays in the first-level cache while the inputs stream by.
constexpr std::int64_t kBlockNumel = 1024;
constexpr std::byte kZeros[kBlockNumel * sizeof(double)] = {};

// How an element type is stored, summed (Sum) and converted. Conversions are integer arithmetic where that vectorises.
template <class T>
struct Plain {
  using Stored = T;
  using Sum = T;
  FSDP_INLINE static T widen(T value) { return value; }
  FSDP_INLINE static T narrow(T value) { return value; }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  using Sum = float;
  FSDP_INLINE static float widen(std::uint16_t value) { return std::bit_cast<float>(std::uint32_t{value} << 16); }
  FSDP_INLINE static std::uint16_t narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40U;
    return static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? quiet_nan : rounded);
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Sum = float;
  FSDP_INLINE static float widen(std::uint16_t value) {
    const std::uint32_t magnitude = value & 0x7fffU;
    const std::uint32_t rebias = 112U << 23;
    const std::uint32_t normal = (magnitude << 13) + rebias + (magnitude >= 0x7c00U ? rebias : 0U);
    // A subnormal m is m * 2^-24, and next to 0.5 the steps of a float are just that wide: right even if the CPU flushes.
    const auto subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(0x3f000000U + magnitude) - 0.5F);
    const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000U) << 16;
    return std::bit_cast<float>((magnitude < 0x0400U ? subnormal : normal) | sign);
  }
  FSDP_INLINE static std::uint16_t narrow(float value) {
    return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
  }
};

struct Bool : Plain<std::uint8_t> {};

template <class Element>
FSDP_INLINE typename Element::Stored load(const std::byte* from, std::int64_t i) {
  typename Element::Stored value;
  std::memcpy(&value, from + static_cast<std::size_t>(i) * sizeof(value), sizeof(value));
  return value;
}

template <class Value>
FSDP_INLINE void store(std::byte* to, std::int64_t i, Value value) {
  std::memcpy(to + static_cast<std::size_t>(i) * sizeof(value), &value, sizeof(value));
}

template <class Element, ReduceOp op>
FSDP_INLINE typename Element::Sum combine(typename Element::Sum a, typename Element::Sum b) {
  using Sum = typename Element::Sum;
  if constexpr (op == ReduceOp::kMax) return a > b || a != a ? a : b;  // a != a: a NaN stays
  if constexpr (op == ReduceOp::kMin) return a < b || a != a ? a : b;
  if constexpr (std::is_same_v<Element, Bool>) return a | b;
  if constexpr (std::is_integral_v<Sum>) {
    using Unsigned = std::make_unsigned_t<Sum>;  // wraps by definition
    return static_cast<Sum>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
  }
  return static_cast<Sum>(a + b);
}

// The elements [begin, begin + numel) of all inputs, folded in rank order.
template <class Element, ReduceOp op>
FSDP_INLINE void fold_block(std::span<const std::byte* const> inputs, std::int64_t begin, std::int64_t numel,
                            typename Element::Sum* sum) {
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    const std::byte* input = inputs[rank]
                                 ? inputs[rank] + static_cast<std::size_t>(begin) * sizeof(typename Element::Stored)
                                 : kZeros;
    if (rank == 0) {
      for (std::int64_t i = 0; i < numel; ++i) sum[i] = Element::widen(load<Element>(input, i));
    } else {
      for (std::int64_t i = 0; i < numel; ++i) {
        sum[i] = combine<Element, op>(sum[i], Element::widen(load<Element>(input, i)));
      }
    }
  }
}

template <class Element>
FSDP_INLINE void reduce_elements(const ReduceRequest& request) {
  using Sum = typename Element::Sum;
  alignas(64) Sum sum[kBlockNumel];
  using Quotient = std::conditional_t<std::is_integral_v<Sum>, std::int64_t, Sum>;  // 128 ranks do not fit an int8
  const auto divisor = static_cast<Quotient>(request.divisor);
  for (std::int64_t begin = 0; begin < request.numel; begin += kBlockNumel) {
    const std::int64_t numel = std::min(kBlockNumel, request.numel - begin);
    fold_block<Element, ReduceOp::kSum>(request.inputs, begin, numel, sum);
    // Not a multiplication by the inverse: that would round twice.
    if (request.divisor != 1) {
      for (std::int64_t i = 0; i < numel; ++i) sum[i] = static_cast<Sum>(sum[i] / divisor);
    }
    std::byte* output = request.output + static_cast<std::size_t>(begin) * sizeof(Sum);
    if (request.accumulate) {
      for (std::int64_t i = 0; i < numel; ++i) {
        store(output, i, combine<Plain<Sum>, ReduceOp::kSum>(load<Plain<Sum>>(output, i), sum[i]));
      }
    } else {
      std::memcpy(output, sum, static_cast<std::size_t>(numel) * sizeof(Sum));
    }
  }
}

template <class Element, ReduceOp op>
FSDP_INLINE void fold_elements(const OrderedFold& fold) {
  alignas(64) typename Element::Sum sum[kBlockNumel];
  for (std::int64_t begin = 0; begin < fold.numel; begin += kBlockNumel) {
    const std::int64_t numel = std::min(kBlockNumel, fold.numel - begin);
    fold_block<Element, op>(fold.inputs, begin, numel, sum);
    for (std::int64_t i = 0; i < numel; ++i) store(fold.output, begin + i, Element::narrow(sum[i]));
  }
}

template <class Element>
FSDP_INLINE void run_elements(const ReduceRequest& request) {
  reduce_elements<Element>(request);
}

template <class Element>
FSDP_INLINE void run_elements(const OrderedFold& fold) {
  switch (fold.op) {
    case ReduceOp::kSum: return fold_elements<Element, ReduceOp::kSum>(fold);
    case ReduceOp::kMax: return fold_elements<Element, ReduceOp::kMax>(fold);
    case ReduceOp::kMin: return fold_elements<Element, ReduceOp::kMin>(fold);
  }
}

template <class Work>
FSDP_INLINE void run(const Work& work, DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return run_elements<Plain<float>>(work);
    case DType::kFloat64: return run_elements<Plain<double>>(work);
    case DType::kFloat16: return run_elements<Float16>(work);
    case DType::kBFloat16: return run_elements<BFloat16>(work);
    case DType::kInt64: return run_elements<Plain<std::int64_t>>(work);
    case DType::kInt32: return run_elements<Plain<std::int32_t>>(work);
    case DType::kInt16: return run_elements<Plain<std::int16_t>>(work);
    case DType::kInt8: return run_elements<Plain<std::int8_t>>(work);
    case DType::kUInt8: return run_elements<Plain<std::uint8_t>>(work);
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

void ordered_sum(const ReduceRequest& request, InstructionSet set) { run_with(set, request, request.input_dtype); }

void ordered_fold(const OrderedFold& fold, InstructionSet set) { run_with(set, fold, fold.dtype); }

}  // namespace fsdp
