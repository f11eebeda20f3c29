#include "sharding/optimizer_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "memory/half.h"

namespace fsdp {
namespace {

std::vector<float> normal(std::size_t numel, std::uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(numel);
  for (float& value : values) value = distribution(engine);
  return values;
}

template <class T>
std::byte* bytes(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

struct State {
  std::vector<float> parameter, gradient, first, second;
  explicit State(std::size_t numel)
      : parameter(normal(numel, 1)), gradient(normal(numel, 2)), first(normal(numel, 3)), second(numel) {
    for (std::size_t i = 0; i < numel; ++i) second[i] = std::abs(first[i]);
  }
  OptimizerSpan span(std::size_t begin, std::size_t end) {
    const std::size_t offset = begin * sizeof(float);
    return {DType::kFloat32,       bytes(parameter) + offset, bytes(gradient) + offset,
            bytes(first) + offset, bytes(second) + offset,    static_cast<std::int64_t>(end - begin)};
  }
};

constexpr AdamUpdate kAdamW{
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .gradient = {.scale = 0.5}, .step = 7};

TEST(OptimizerKernelsTest, AdamWFollowsItsFormula) {
  State state(1001);
  const State before = state;
  adam_update(state.span(0, 1001), kAdamW);
  for (std::size_t i = 0; i < 1001; ++i) {
    const double g = before.gradient[i] * 0.5;
    const double m = 0.9 * before.first[i] + 0.1 * g, v = 0.95 * before.second[i] + 0.05 * g * g;
    const double expected = before.parameter[i] * (1 - 1e-2 * 0.1) -
                            1e-2 / (1 - std::pow(0.9, 7)) * m /
                                (std::sqrt(v) / std::sqrt(1 - std::pow(0.95, 7)) + 1e-8);
    EXPECT_NEAR(state.first[i], m, 1e-6 * (1 + std::abs(m)));
    EXPECT_NEAR(state.second[i], v, 1e-6 * (1 + std::abs(v)));
    EXPECT_NEAR(state.parameter[i], expected, 2e-6 * (1 + std::abs(expected)));
  }
}

// Vector bodies and tails fall on other elements for each cut: the bits must not.
TEST(OptimizerKernelsTest, HasTheSameBitsForAnyCut) {
  constexpr std::size_t kNumel = 517;
  State whole(kNumel);
  adam_update(whole.span(0, kNumel), kAdamW);
  sgd_update(whole.span(0, kNumel), {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true, .step = 3});
  for (const std::size_t cut : {1UL, 7UL, 16UL, 100UL, 509UL}) {
    State parts(kNumel);
    for (const auto& [begin, end] : {std::pair{std::size_t{0}, cut}, std::pair{cut, kNumel}}) {
      adam_update(parts.span(begin, end), kAdamW);
      sgd_update(parts.span(begin, end),
                 {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true, .step = 3});
    }
    EXPECT_EQ(std::memcmp(parts.parameter.data(), whole.parameter.data(), kNumel * sizeof(float)), 0) << cut;
    EXPECT_EQ(std::memcmp(parts.second.data(), whole.second.data(), kNumel * sizeof(float)), 0) << cut;
  }
}

TEST(OptimizerKernelsTest, AdamAddsWeightDecayToTheGradient) {
  State state(100);
  const State before = state;
  AdamUpdate update = kAdamW;
  update.decoupled = false;
  adam_update(state.span(0, 100), update);
  for (std::size_t i = 0; i < 100; ++i) {
    const double g = before.gradient[i] * 0.5 + 0.1 * before.parameter[i];
    const double m = 0.9 * before.first[i] + 0.1 * g, v = 0.95 * before.second[i] + 0.05 * g * g;
    const double expected = before.parameter[i] - 1e-2 / (1 - std::pow(0.9, 7)) * m /
                                                      (std::sqrt(v) / std::sqrt(1 - std::pow(0.95, 7)) + 1e-8);
    EXPECT_NEAR(state.parameter[i], expected, 2e-6 * (1 + std::abs(expected)));
  }
}

TEST(OptimizerKernelsTest, ClampsTheScaledGradient) {
  State state(257);
  const State before = state;
  sgd_update(state.span(0, 257), {.lr = 0.5, .gradient = {.scale = 2, .limit = 0.75}});
  for (std::size_t i = 0; i < 257; ++i) {
    const float g = std::clamp(before.gradient[i] * 2, -0.75F, 0.75F);
    EXPECT_EQ(state.parameter[i], before.parameter[i] - 0.5F * g);
  }
}

// The master and its rounded copy come out of one pass.
template <class Rounded, class Update>
void expect_rounded_copy(DType dtype, void (*apply)(const OptimizerSpan&, const Update&), const Update& update) {
  State alone(300), beside(300);
  std::vector<Rounded> rounded(300);
  OptimizerSpan span = beside.span(0, 300);
  span.rounded = bytes(rounded);
  span.rounded_dtype = dtype;
  apply(alone.span(0, 300), update);
  apply(span, update);
  EXPECT_EQ(beside.parameter, alone.parameter);
  for (std::size_t i = 0; i < 300; ++i) EXPECT_EQ(rounded[i].bits, narrow<Rounded>(alone.parameter[i]).bits) << i;
}

TEST(OptimizerKernelsTest, RoundsTheMasterIntoTheParameter) {
  const SgdUpdate sgd{.lr = 0.1, .momentum = 0.9, .step = 2};
  expect_rounded_copy<BFloat16>(DType::kBFloat16, adam_update, kAdamW);
  expect_rounded_copy<Half>(DType::kFloat16, adam_update, kAdamW);
  expect_rounded_copy<BFloat16>(DType::kBFloat16, sgd_update, sgd);
  expect_rounded_copy<Half>(DType::kFloat16, sgd_update, sgd);
}

TEST(OptimizerKernelsTest, AveragesWithTheSameBitsForAnyCut) {
  const std::vector<float> value = normal(301, 6);
  std::vector<float> whole = normal(301, 7), parts = whole, expected = whole;
  const auto* from = reinterpret_cast<const std::byte*>(value.data());
  average_update(bytes(whole), from, 301, DType::kFloat32, 0.75);
  average_update(bytes(parts), from, 13, DType::kFloat32, 0.75);
  average_update(bytes(parts) + 13 * sizeof(float), from + 13 * sizeof(float), 288, DType::kFloat32, 0.75);
  EXPECT_EQ(parts, whole);
  for (std::size_t i = 0; i < 301; ++i) EXPECT_NEAR(whole[i], 0.75F * expected[i] + 0.25F * value[i], 1e-6);
}

TEST(OptimizerKernelsTest, CastsBothWays) {
  const std::vector<float> values = normal(77, 4);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<std::uint16_t> narrowed(77);
    std::vector<float> back(77);
    cast_elements(bytes(narrowed), dtype, reinterpret_cast<const std::byte*>(values.data()), DType::kFloat32, 77);
    cast_elements(bytes(back), DType::kFloat32, bytes(narrowed), dtype, 77);
    const float precision = dtype == DType::kBFloat16 ? 1.0F / 256 : 1.0F / 2048;
    for (std::size_t i = 0; i < 77; ++i) EXPECT_NEAR(back[i], values[i], std::abs(values[i]) * precision + 1e-7F);
  }
}

TEST(OptimizerKernelsTest, SgdMomentumStartsFromTheFirstGradient) {
  State state(33);
  const State before = state;
  sgd_update(state.span(0, 33), {.lr = 0.5, .momentum = 0.9, .step = 1});
  for (std::size_t i = 0; i < 33; ++i) {
    EXPECT_EQ(state.first[i], before.gradient[i]);
    EXPECT_EQ(state.parameter[i], before.parameter[i] - 0.5F * before.gradient[i]);
  }
}

TEST(OptimizerKernelsTest, KeepsHalfParametersWithFloatState) {
  std::vector<BFloat16> parameter(70, narrow<BFloat16>(1.0F));
  std::vector<float> gradient(70, 0.25F), first(70), second(70);
  adam_update({DType::kBFloat16, bytes(parameter), bytes(gradient), bytes(first), bytes(second), 70},
              {.lr = 0.125, .beta1 = 0.9, .beta2 = 0.999, .eps = 0, .weight_decay = 0, .step = 1});
  for (const BFloat16 value : parameter) EXPECT_EQ(widen(value), 0.875F);  // one step of lr
  std::vector<Half> half(5, narrow<Half>(2.0F));
  std::vector<float> ones(5, 1.0F);
  sgd_update({DType::kFloat16, bytes(half), bytes(ones), nullptr, nullptr, 5}, {.lr = 0.5});
  for (const Half value : half) EXPECT_EQ(widen(value), 1.5F);
}

TEST(OptimizerKernelsTest, SumsSquaresOfEveryElement) {
  for (const std::size_t numel : {0UL, 1UL, 7UL, 8UL, 1003UL}) {
    const std::vector<float> values = normal(numel, 9);
    double expected = 0;
    for (const float value : values) expected += static_cast<double>(value) * value;
    EXPECT_NEAR(norm_part(reinterpret_cast<const std::byte*>(values.data()), static_cast<std::int64_t>(numel),
                          DType::kFloat32, 2),
                expected, 1e-12 * (1 + expected));
  }
  const std::vector<double> values{3, 4};
  EXPECT_EQ(norm_part(reinterpret_cast<const std::byte*>(values.data()), 2, DType::kFloat64, 2), 25);
}

TEST(OptimizerKernelsTest, TakesNormsOfAnyPower) {
  const std::vector<float> values{3, -4, 0, 12, 0.5F, -7, 1, 2, -1.5F, 6};
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double p : {0.5, 1.0, 2.0, 3.0, kInfinity}) {
    const auto part = [&](std::size_t begin, std::size_t end) {
      return norm_part(reinterpret_cast<const std::byte*>(values.data() + begin),
                       static_cast<std::int64_t>(end - begin), DType::kFloat32, p);
    };
    double expected = 0;
    for (const float value : values) {
      expected = std::isinf(p) ? std::max<double>(expected, std::abs(value)) : expected + std::pow(std::abs(value), p);
    }
    if (!std::isinf(p)) expected = std::pow(expected, 1 / p);
    EXPECT_NEAR(norm_of(combine_norm_parts(part(0, 3), part(3, 10), p), p), expected, 1e-12 * expected) << p;
  }
}

TEST(OptimizerKernelsTest, ShowsAnElementThatIsNotFinite) {
  std::vector<float> values(100, 1.0F);
  values[61] = std::nanf("");
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()})
    EXPECT_FALSE(std::isfinite(norm_part(bytes(values), 100, DType::kFloat32, p))) << p;
}

TEST(HalfTest, RoundsToNearestEvenAndKeepsSpecialValues) {
  EXPECT_EQ(narrow<BFloat16>(1.00390625F).bits, 0x3f80);  // half way: to even, down
  EXPECT_EQ(narrow<BFloat16>(1.01171875F).bits, 0x3f82);  // half way: to even, up
  EXPECT_EQ(widen(narrow<BFloat16>(-INFINITY)), -INFINITY);
  EXPECT_TRUE(std::isnan(widen(narrow<BFloat16>(std::bit_cast<float>(0x7f800001U)))));
  EXPECT_EQ(widen(narrow<Half>(65504.0F)), 65504.0F);
}

}  // namespace
}  // namespace fsdp
