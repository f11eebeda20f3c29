#include "comm/ordered_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/comm/reference.h"

namespace fsdp {
namespace {

using reference::Bytes;

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <class T>
std::vector<T> folded(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& inputs) {
  std::vector<const std::byte*> pointers;
  for (const auto& input : inputs) pointers.push_back(reinterpret_cast<const std::byte*>(input.data()));
  std::vector<T> output(inputs[0].size());
  ordered_fold(
      {pointers, static_cast<std::int64_t>(output.size()), dtype, op, reinterpret_cast<std::byte*>(output.data())});
  return output;
}

template <class Sum>
std::vector<Sum> summed(DType dtype, const std::vector<Bytes>& inputs, std::int64_t numel, int divisor = 1) {
  std::vector<const std::byte*> pointers;
  for (const Bytes& input : inputs) pointers.push_back(input.empty() ? nullptr : input.data());
  std::vector<Sum> output(static_cast<std::size_t>(numel));
  ordered_sum({.inputs = pointers,
               .numel = numel,
               .input_dtype = dtype,
               .output = reinterpret_cast<std::byte*>(output.data()),
               .divisor = divisor});
  return output;
}

// All bit patterns of 16 bits.
std::vector<std::uint16_t> all_halves() {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

TEST(OrderedSumTest, AddsFromTheFirstRankToTheLast) {
  // (1 + 2^24) - 2^24 is 0 in fp32, 1 + (2^24 - 2^24) would be 1.
  const std::vector<Bytes> inputs{bytes_of<float>({1}), bytes_of<float>({16777216}), bytes_of<float>({-16777216})};
  EXPECT_EQ(summed<float>(DType::kFloat32, inputs, 1)[0], 0.0F);
  const std::vector<Bytes> reversed{inputs[2], inputs[1], inputs[0]};
  EXPECT_EQ(summed<float>(DType::kFloat32, reversed, 1)[0], 1.0F);
}

TEST(OrderedSumTest, ContinuesFromTheOutputInOrder) {
  const std::vector<Bytes> inputs{bytes_of<float>({16777216}), bytes_of<float>({-16777216})};
  const std::vector<const std::byte*> pointers{inputs[0].data(), nullptr, inputs[1].data()};
  float added = 1, continued = 1;
  ordered_sum({.inputs = pointers, .numel = 1, .output = reinterpret_cast<std::byte*>(&added), .accumulate = true});
  ordered_sum({.inputs = pointers, .numel = 1, .output = reinterpret_cast<std::byte*>(&continued), .in_order = true});
  EXPECT_EQ(added, 1.0F);      // 1 + (2^24 - 2^24)
  EXPECT_EQ(continued, 0.0F);  // (1 + 2^24) - 2^24
}

TEST(OrderedSumTest, MatchesAScalarFoldAtLengthsAroundABlock) {
  for (const std::int64_t numel : {1, 7, 1023, 1024, 1025, 4099}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt64,
                              DType::kInt32, DType::kInt16, DType::kInt8, DType::kUInt8}) {
      std::vector<Bytes> inputs;
      std::vector<const std::byte*> pointers;
      for (int rank = 0; rank < 5; ++rank) inputs.push_back(reference::elements(dtype, rank, numel));
      inputs[3].clear();
      for (const Bytes& input : inputs) pointers.push_back(input.empty() ? nullptr : input.data());
      const Bytes expected = reference::reduce(dtype, inputs, numel, 3, {});
      Bytes output(expected.size());
      ordered_sum({.inputs = pointers, .numel = numel, .input_dtype = dtype, .output = output.data(), .divisor = 3});
      EXPECT_TRUE(output == expected) << name_of(dtype) << " x " << numel;
      const Bytes twice = reference::reduce(dtype, inputs, numel, 3, expected);
      ordered_sum({.inputs = pointers,
                   .numel = numel,
                   .input_dtype = dtype,
                   .output = output.data(),
                   .accumulate = true,
                   .divisor = 3});
      EXPECT_TRUE(output == twice) << name_of(dtype) << " x " << numel;
    }
  }
}

TEST(OrderedSumTest, EveryInstructionSetGivesTheSameBits) {
  std::vector<std::vector<std::uint16_t>> inputs(3, all_halves());  // NaNs, infinities and subnormals included
  std::reverse(inputs[1].begin(), inputs[1].end());
  std::rotate(inputs[2].begin(), inputs[2].begin() + 1000, inputs[2].end());
  std::vector<const std::byte*> pointers;
  for (const auto& input : inputs) pointers.push_back(reinterpret_cast<const std::byte*>(input.data()));
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt16}) {
    const auto numel = static_cast<std::int64_t>(65536 * sizeof(std::uint16_t) / size_of(dtype));
    std::vector<Bytes> results;
    for (int set = 0; set <= static_cast<int>(best_instruction_set()); ++set) {
      Bytes sum(static_cast<std::size_t>(numel) * sizeof(double)), fold(sum);
      ordered_sum({.inputs = pointers, .numel = numel, .input_dtype = dtype, .output = sum.data(), .divisor = 3},
                  static_cast<InstructionSet>(set));
      ordered_fold({pointers, numel, dtype, ReduceOp::kSum, fold.data()}, static_cast<InstructionSet>(set));
      sum.insert(sum.end(), fold.begin(), fold.end());
      results.push_back(sum);
      EXPECT_TRUE(results.front() == results.back()) << name_of(dtype) << ", instruction set " << set;
    }
  }
}

TEST(OrderedSumTest, OneInputAndDivisorOneKeepEveryBit) {
  const std::vector<std::uint32_t> odd{0x80000000U, 0x7fc12345U, 0x7f812345U, 0x00000001U, 0xff800000U};
  const auto sums = summed<std::uint32_t>(DType::kFloat32, {bytes_of(odd)}, 5);
  EXPECT_EQ(sums, odd);
  const auto halves = all_halves();
  const auto widened = summed<std::uint32_t>(DType::kBFloat16, {bytes_of(halves)}, 65536);
  for (std::size_t i = 0; i < halves.size(); ++i) ASSERT_EQ(widened[i], static_cast<std::uint32_t>(i) << 16);
}

TEST(OrderedSumTest, WidensEveryFloat16Exactly) {
  const auto halves = all_halves();
  const auto widened = summed<float>(DType::kFloat16, {bytes_of(halves)}, 65536);
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const auto expected = static_cast<float>(std::bit_cast<_Float16>(halves[i]));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(widened[i])) << i;
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(widened[i]), std::bit_cast<std::uint32_t>(expected)) << i;
    }
  }
}

TEST(OrderedSumTest, FoldOfOneInputKeepsEveryHalfButSignallingNans) {
  const auto halves = all_halves();
  for (const auto& [dtype, infinity] : {std::pair{DType::kBFloat16, 0x7f80}, std::pair{DType::kFloat16, 0x7c00}}) {
    const auto output = folded<std::uint16_t>(dtype, ReduceOp::kSum, {halves});
    for (std::size_t i = 0; i < halves.size(); ++i) {
      if ((halves[i] & 0x7fff) <= infinity) {
        ASSERT_EQ(output[i], halves[i]);
      } else {
        ASSERT_GT(output[i] & 0x7fff, infinity) << "a NaN must stay one";
      }
    }
  }
}

TEST(OrderedSumTest, RoundsSixteenBitSumsOnceAndToEven) {
  // bf16 has 8 bits: 256 + 1 + 1 is 258 in fp32; rounding after each addition would stay at 256.
  const std::vector<std::vector<std::uint16_t>> inputs{{0x4380}, {0x3f80}, {0x3f80}};
  EXPECT_EQ(folded<std::uint16_t>(DType::kBFloat16, ReduceOp::kSum, inputs)[0], 0x4381);
  const std::vector<std::vector<std::uint16_t>> tie{{0x4380}, {0x3f80}};
  EXPECT_EQ(folded<std::uint16_t>(DType::kBFloat16, ReduceOp::kSum, tie)[0], 0x4380);
}

TEST(OrderedSumTest, IntegersWrapAndBoolsAreOred) {
  const auto most = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(folded<std::int64_t>(DType::kInt64, ReduceOp::kSum, {{most}, {1}})[0],
            std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(folded<std::int8_t>(DType::kInt8, ReduceOp::kSum, {{100}, {100}})[0], -56);
  EXPECT_EQ(folded<std::uint8_t>(DType::kBool, ReduceOp::kSum, {{1, 0, 0, 1}, {1, 0, 1, 0}}),
            (std::vector<std::uint8_t>{1, 0, 1, 1}));
}

TEST(OrderedSumTest, ANanMakesMaxAndMinNanWhicheverRankHasIt) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
    const auto output = folded<float>(DType::kFloat32, op, {{nan, 1, 1, 3}, {1, nan, 1, 2}, {1, 1, nan, 1}});
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(output[static_cast<std::size_t>(i)])) << i;
    EXPECT_EQ(output[3], op == ReduceOp::kMax ? 3.0F : 1.0F);
  }
}

TEST(OrderedSumTest, DividesSmallIntegersByMoreRanksThanTheyHold) {
  const std::vector<Bytes> inputs{bytes_of<std::int8_t>({100, -100})};
  EXPECT_EQ(summed<std::int8_t>(DType::kInt8, inputs, 2, 128), (std::vector<std::int8_t>{0, 0}));
}

TEST(OrderedSumTest, TheOutputOfAFoldMayBeAnInput) {
  std::vector<float> first(3000, 1), second(3000, 2);
  const std::byte* inputs[] = {reinterpret_cast<const std::byte*>(first.data()),
                               reinterpret_cast<const std::byte*>(second.data())};
  ordered_fold({inputs, 3000, DType::kFloat32, ReduceOp::kSum, reinterpret_cast<std::byte*>(second.data())});
  EXPECT_EQ(second, std::vector<float>(3000, 3));
}

}  // namespace
}  // namespace fsdp
