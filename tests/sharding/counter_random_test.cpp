#include "sharding/counter_random.h"

#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

namespace fsdp {
namespace {

template <class T>
std::byte* bytes(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

// The known answers that come with the generator's reference implementation (Random123, kat_vectors).
TEST(PhiloxTest, GivesTheKnownAnswers) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(CounterRandomTest, MakesAnyRangeByItself) {
  constexpr std::int64_t kNumel = 1001;
  const RandomDraw draw{.seed = 7, .draw = 3};
  for (const bool normal : {false, true}) {
    const auto fill = [&](std::byte* to, std::int64_t begin, std::int64_t numel) {
      return normal ? fill_normal(to, DType::kFloat32, begin, numel, draw, 1, 2)
                    : fill_uniform(to, DType::kFloat32, begin, numel, draw, -1, 3);
    };
    std::vector<float> whole(kNumel);
    fill(bytes(whole), 0, kNumel);
    for (const std::int64_t cut : {0, 1, 2, 333, 1000, 1001}) {
      std::vector<float> parts(kNumel);
      fill(bytes(parts), 0, cut);
      fill(bytes(parts) + static_cast<std::size_t>(cut) * sizeof(float), cut, kNumel - cut);
      EXPECT_EQ(parts, whole) << cut;
    }
  }
}

TEST(CounterRandomTest, HasTheMomentsOfItsDistribution) {
  constexpr std::int64_t kNumel = 200000;
  std::vector<double> values(kNumel);
  const auto moments = [&] {
    double sum = 0, squares = 0;
    for (const double value : values) sum += value;
    for (const double value : values) squares += (value - sum / kNumel) * (value - sum / kNumel);
    return std::pair(sum / kNumel, squares / kNumel);
  };
  fill_uniform(bytes(values), DType::kFloat64, 0, kNumel, {1, 0}, -1, 3);
  EXPECT_NEAR(moments().first, 1, 0.02);
  EXPECT_NEAR(moments().second, 16.0 / 12, 0.02);
  for (const double value : values) EXPECT_TRUE(value >= -1 && value < 3);
  fill_normal(bytes(values), DType::kFloat64, 0, kNumel, {1, 0}, 5, 2);
  EXPECT_NEAR(moments().first, 5, 0.03);
  EXPECT_NEAR(moments().second, 4, 0.06);
}

TEST(CounterRandomTest, DiffersBySeedDrawAndElement) {
  std::vector<float> a(100), b(100), c(100);
  fill_uniform(bytes(a), DType::kFloat32, 0, 100, {1, 0}, 0, 1);
  fill_uniform(bytes(b), DType::kFloat32, 0, 100, {2, 0}, 0, 1);
  fill_uniform(bytes(c), DType::kFloat32, 0, 100, {1, 1}, 0, 1);
  EXPECT_NE(a, b);
  EXPECT_NE(a, c);
  for (std::size_t i = 1; i < 100; ++i) EXPECT_NE(a[i], a[i - 1]);
}

}  // namespace
}  // namespace fsdp
