// bf16 and fp16 as storage types: widened to float for arithmetic, rounded to nearest even on the way back. Integer
// arithmetic where that vectorises, and inlined always, so that a loop compiled for an instruction set keeps to it.
#pragma once

#include <bit>
#include <cstdint>

namespace fsdp {

struct BFloat16 {
  std::uint16_t bits = 0;
};

struct Half {
  std::uint16_t bits = 0;
};

template <class T>
[[gnu::always_inline]] inline T widen(T value) {
  return value;
}
[[gnu::always_inline]] inline float widen(BFloat16 value) {
  return std::bit_cast<float>(std::uint32_t{value.bits} << 16);
}
[[gnu::always_inline]] inline float widen(Half value) {
  const std::uint32_t magnitude = value.bits & 0x7fffU;
  const std::uint32_t rebias = 112U << 23;
  const std::uint32_t normal = (magnitude << 13) + rebias + (magnitude >= 0x7c00U ? rebias : 0U);
  // A subnormal m is m * 2^-24, and next to 0.5 the steps of a float are just that wide: right even if the CPU flushes.
  const auto subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(0x3f000000U + magnitude) - 0.5F);
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000U) << 16;
  return std::bit_cast<float>((magnitude < 0x0400U ? subnormal : normal) | sign);
}

template <class To, class From>
[[gnu::always_inline]] inline To narrow(From value) {
  return static_cast<To>(value);
}
template <>
[[gnu::always_inline]] inline BFloat16 narrow<BFloat16, float>(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40U;
  return {static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? quiet_nan : rounded)};
}
template <>
[[gnu::always_inline]] inline Half narrow<Half, float>(float value) {
  return {std::bit_cast<std::uint16_t>(static_cast<_Float16>(value))};
}

}  // namespace fsdp
