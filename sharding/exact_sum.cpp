#include "sharding/exact_sum.h"

#include <bit>
#include <cmath>

namespace fsdp {
namespace {

constexpr std::uint64_t kDigitMask = 0xffffffff;
constexpr std::uint64_t kMostWaiting = std::uint64_t{1} << 31;  // digits below 2^32 each: far from 2^64

}  // namespace

void ExactSum::add(double term) {
  constexpr int kMantissaBits = 52;
  const auto bits = std::bit_cast<std::uint64_t>(term);
  const std::uint64_t exponent = bits >> kMantissaBits;  // no sign
  const std::uint64_t fraction = bits & ((std::uint64_t{1} << kMantissaBits) - 1);
  const std::uint64_t mantissa = exponent != 0 ? fraction | std::uint64_t{1} << kMantissaBits : fraction;
  const std::uint64_t position = exponent != 0 ? exponent - 1 : 0;  // subnormals have the weight of exponent 1
  const std::size_t digit = position / kDigitBits;
  const std::uint64_t shift = position % kDigitBits;
  const std::uint64_t low = mantissa << shift, high = (mantissa >> 1) >> (63 - shift);  // shift may be 0
  digits_[digit] += low & kDigitMask;
  digits_[digit + 1] += low >> kDigitBits;
  digits_[digit + 2] += high;
  if (++waiting_ == kMostWaiting) carry();
}

void ExactSum::add(const ExactSum& other) {
  ExactSum carried = other;
  carried.carry();
  carry();
  for (std::size_t i = 0; i < kDigits; ++i) digits_[i] += carried.digits_[i];
  waiting_ = 1;
}

double ExactSum::value() const {
  ExactSum carried = *this;  // of one sum there is one carried form
  carried.carry();
  double value = 0;
  for (std::size_t i = kDigits; i-- > 0;) {
    value += std::ldexp(static_cast<double>(carried.digits_[i]), kLowestExponent + static_cast<int>(i) * kDigitBits);
  }
  return value;
}

void ExactSum::carry() {
  std::uint64_t above = 0;
  for (std::uint64_t& digit : digits_) {
    digit += above;
    above = digit >> kDigitBits;
    digit &= kDigitMask;
  }
  waiting_ = 0;
}

}  // namespace fsdp
