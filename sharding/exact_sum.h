// A sum of doubles without rounding: the same whatever the order of its terms, or who added which.
#pragma once

#include <array>
#include <cstdint>

namespace fsdp {

// A fixed-point number as wide as the range of double (Kulisch, "Computer Arithmetic and Validity", 2013), in digits of
// 32 bits, the lowest of weight 2^-1074. Each digit has 64 bits of room, so that carries may wait:
//
//   term 53 bits, shifted by 0..31      [ 21 bits ][ 32 bits ][ 32 bits ]
//   digits                         ...    k + 2      k + 1      k        ...
//
// Trivially copyable, so that ranks can exchange it as bytes.
class ExactSum {
 public:
  // REQUIRES a finite term of at least 0.
  void add(double term);
  void add(const ExactSum& other);
  // Rounded from the exact sum alone, to within a few units in the last place; infinity above the range of double.
  double value() const;

 private:
  static constexpr int kDigitBits = 32;
  static constexpr int kLowestExponent = -1074;
  static constexpr std::size_t kDigits = 68;  // 2098 bits of double's range, and room for 2^77 terms
  void carry();

  std::array<std::uint64_t, kDigits> digits_{};
  std::uint64_t waiting_ = 0;  // additions since the last carry
};

}  // namespace fsdp
