// bf16 and fp16 as storage types: widened to float for arithmetic, rounded to nearest even on the way back.
#pragma once

#include <bit>
#include <cstdint>

namespace fsdp {

struct BFloat16 {
  std::uint16_t bits = 0;
};

struct Half {
  _Float16 value = 0;
};

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(BFloat16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }
inline float widen(Half value) { return static_cast<float>(value.value); }

template <class To, class From>
inline To narrow(From value) {
  return static_cast<To>(value);
}
template <>
inline BFloat16 narrow<BFloat16, float>(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  return {static_cast<std::uint16_t>(nan ? 0x7fc0U : rounded)};
}
template <>
inline Half narrow<Half, float>(float value) {
  return {static_cast<_Float16>(value)};
}

}  // namespace fsdp
