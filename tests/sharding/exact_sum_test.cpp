#include "sharding/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace fsdp {
namespace {

// Any double of at least 0 that is finite, small exponents as likely as large ones.
std::vector<double> any_terms(std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<double> terms(count);
  for (double& term : terms) {
    const auto exponent = static_cast<int>(random() % 1100) - 1074;
    term = std::ldexp(static_cast<double>(random() >> 11), exponent - 53);
  }
  return terms;
}

double sum_of(const std::vector<double>& terms) {
  ExactSum sum;
  for (const double term : terms) sum.add(term);
  return sum.value();
}

TEST(ExactSumTest, HasTheSameBitsInAnyOrderAndForAnyOwnersOfTheTerms) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::vector<double> terms = any_terms(997, seed);
    const double expected = sum_of(terms);
    std::mt19937_64 random(seed);
    std::shuffle(terms.begin(), terms.end(), random);
    EXPECT_EQ(sum_of(terms), expected);
    for (const std::size_t owners : {1, 2, 3, 7}) {
      std::vector<ExactSum> parts(owners);
      for (const double term : terms) parts[random() % owners].add(term);
      ExactSum total;
      for (const ExactSum& part : parts) total.add(part);
      EXPECT_EQ(total.value(), expected);
    }
  }
}

TEST(ExactSumTest, LosesNothingOfSmallTermsBesideLargeOnes) {
  std::vector<double> terms{0x1p60};
  for (int i = 0; i < 4096; ++i) terms.push_back(0x1p-4);  // each is lost in a double beside 2^60
  EXPECT_EQ(sum_of(terms), 0x1p60 + 256);
  double rounded = 0;
  for (const double term : terms) rounded += term;
  EXPECT_EQ(rounded, 0x1p60);
}

TEST(ExactSumTest, HoldsTheWholeRangeOfDouble) {
  const double least = std::numeric_limits<double>::denorm_min(), most = std::numeric_limits<double>::max();
  EXPECT_EQ(sum_of({}), 0);
  EXPECT_EQ(sum_of({0, 0}), 0);
  EXPECT_EQ(sum_of({least}), least);
  EXPECT_EQ(sum_of({least, least, least}), 3 * least);
  EXPECT_EQ(sum_of({std::numeric_limits<double>::min()}), std::numeric_limits<double>::min());
  EXPECT_EQ(sum_of({most}), most);
  EXPECT_EQ(sum_of({most, most}), std::numeric_limits<double>::infinity());
  // Each bit of each position, by itself.
  for (int exponent = -1074; exponent < 1024; ++exponent)
    EXPECT_EQ(sum_of({std::ldexp(1, exponent)}), std::ldexp(1, exponent));
}

TEST(ExactSumTest, IsWithinAFewUnitsOfTheLongSum) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<double> terms(1000);
    long double expected = 0;  // 64 bits of mantissa, terms of 24: exact
    for (double& term : terms) {
      term = static_cast<double>(random() >> 40) * 0x1p-24;
      expected += static_cast<long double>(term);
    }
    EXPECT_EQ(sum_of(terms), static_cast<double>(expected));
  }
}

}  // namespace
}  // namespace fsdp
