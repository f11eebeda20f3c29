#include "sharding/counter_random.h"

#include <cmath>
#include <numbers>
#include <stdexcept>

#include "memory/half.h"

namespace fsdp {
namespace {

// Two numbers in [0, 1) of 53 bits: those of elements 2 * pair and 2 * pair + 1.
std::array<double, 2> uniform_pair(const RandomDraw& draw, std::uint64_t pair) {
  const auto low = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
  const auto high = [](std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); };
  const auto words = philox({low(pair), high(pair), low(draw.draw), high(draw.draw)},
                            {low(draw.seed), high(draw.seed)});
  const auto fraction = [](std::uint32_t a, std::uint32_t b) {
    return static_cast<double>((std::uint64_t{a} << 21) ^ (std::uint64_t{b} >> 11)) * 0x1p-53;
  };
  return {fraction(words[0], words[1]), fraction(words[2], words[3])};
}

template <class Visit>
void with_type(std::byte* output, DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kFloat32: return visit(reinterpret_cast<float*>(output));
    case DType::kFloat64: return visit(reinterpret_cast<double*>(output));
    case DType::kBFloat16: return visit(reinterpret_cast<BFloat16*>(output));
    case DType::kFloat16: return visit(reinterpret_cast<Half*>(output));
    default: throw std::logic_error("counter_random: not a floating-point type");
  }
}

template <class T>
T rounded(double value) {
  if constexpr (std::is_same_v<T, double>) return value;
  return narrow<T>(static_cast<float>(value));
}

// `make(pair)` gives the values of two neighbours.
template <class Make>
void fill(std::byte* output, DType dtype, std::int64_t begin, std::int64_t numel, const Make& make) {
  with_type(output, dtype, [&]<class T>(T* elements) {
    for (std::int64_t i = begin; i < begin + numel;) {
      const std::array<double, 2> values = make(static_cast<std::uint64_t>(i) / 2);
      for (auto side = static_cast<std::size_t>(i % 2); side < 2 && i < begin + numel; ++side, ++i)
        elements[i - begin] = rounded<T>(values[side]);
    }
  });
}

}  // namespace

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53U} * counter[0], b = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

void fill_uniform(std::byte* output, DType dtype, std::int64_t begin, std::int64_t numel, const RandomDraw& draw,
                  double from, double to) {
  fill(output, dtype, begin, numel, [&](std::uint64_t pair) {
    const std::array<double, 2> u = uniform_pair(draw, pair);
    return std::array{from + (to - from) * u[0], from + (to - from) * u[1]};
  });
}

void fill_normal(std::byte* output, DType dtype, std::int64_t begin, std::int64_t numel, const RandomDraw& draw,
                 double mean, double deviation) {
  fill(output, dtype, begin, numel, [&](std::uint64_t pair) {
    const std::array<double, 2> u = uniform_pair(draw, pair);
    const double radius = deviation * std::sqrt(-2 * std::log(1 - u[0])), angle = 2 * std::numbers::pi * u[1];
    return std::array{mean + radius * std::cos(angle), mean + radius * std::sin(angle)};
  });
}

void fill_value(std::byte* output, DType dtype, std::int64_t numel, double value) {
  with_type(output, dtype, [&]<class T>(T* elements) {
    for (std::int64_t i = 0; i < numel; ++i) elements[i] = rounded<T>(value);
  });
}

}  // namespace fsdp
