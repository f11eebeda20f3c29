#include "checkpoint/reshard_plan.h"

#include <gtest/gtest.h>

#include <fsdp/error.h>

#include "tests/checkpoint/model_shard.h"

namespace fsdp {
namespace {

struct Layout {
  std::vector<std::int64_t> shape, strides;
};

std::vector<Layout> layouts() {
  return {
      {{}, {}},  // 0-d
      {{1}, {1}},
      {{13}, {1}},
      {{4, 6}, {6, 1}},
      {{5, 3}, {1, 5}},         // transposed
      {{7, 1, 3}, {3, 99, 1}},  // the stride of a size of 1 means nothing
      {{1, 1}, {1, 1}},
      {{0}, {1}},
      {{3, 0, 2}, {0, 2, 1}},
      {{2, 3, 2, 5}, {30, 10, 5, 1}},
      {{2, 3, 4, 5}, {60, 1, 15, 3}},  // channels last
      {{3, 2, 4}, {2, 1, 6}},          // a permutation with no name
  };
}

// Counts how often the boxes hold each element, by row-major index.
void count_elements(const std::vector<std::int64_t>& shape, const Box& box, std::vector<int>& counts) {
  const std::vector<std::int64_t> strides = row_major_strides(shape);
  for (std::int64_t i = 0; i < numel_of(box.sizes); ++i) {
    std::int64_t rest = i, index = 0;
    for (std::size_t d = shape.size(); d-- > 0; rest /= box.sizes[d]) {
      index += (box.offsets[d] + rest % box.sizes[d]) * strides[d];
    }
    ++counts.at(static_cast<std::size_t>(index));
  }
}

TEST(ReshardPlanTest, CoversEveryElementExactlyOnceForWorldSizesOneToEight) {
  for (const auto& [shape, strides] : layouts()) {
    for (std::int64_t world = 1; world <= 8; ++world) {
      const std::int64_t numel = numel_of(shape);
      std::vector<int> counts(static_cast<std::size_t>(numel), 0);
      for (std::int64_t rank = 0; rank < world; ++rank) {
        const std::vector<Box> boxes = boxes_of({shape, strides, numel * rank / world, numel * (rank + 1) / world});
        EXPECT_LE(boxes.size(), shape.empty() ? 1 : 2 * shape.size() - 1);
        for (const Box& box : boxes) count_elements(shape, box, counts);
      }
      EXPECT_EQ(counts, std::vector<int>(counts.size(), 1)) << testing::PrintToString(shape) << " world " << world;
    }
  }
}

TEST(ReshardPlanTest, HoldsExactlyTheElementsOfEveryRange) {
  for (const auto& [shape, strides] : layouts()) {
    const std::int64_t numel = numel_of(shape);
    const std::vector<std::int64_t> indices = logical_indices(shape, strides);
    for (std::int64_t begin = 0; begin <= numel; ++begin) {
      for (std::int64_t end = begin; end <= numel; end += 1 + numel / 40) {
        std::vector<int> counts(static_cast<std::size_t>(numel), 0), expected(counts);
        for (std::int64_t i = begin; i < end; ++i) {
          ++expected[static_cast<std::size_t>(indices[static_cast<std::size_t>(i)])];
        }
        for (const Box& box : boxes_of({shape, strides, begin, end})) count_elements(shape, box, counts);
        ASSERT_EQ(counts, expected) << testing::PrintToString(shape) << " [" << begin << ", " << end << ")";
      }
    }
  }
}

// The map at the head of reshard_plan.h.
TEST(ReshardPlanTest, CutsARangeIntoPartialRowWholeRowsPartialRow) {
  const FlatRange range{{4, 6}, {6, 1}, 4, 21};
  const Box head{{0, 4}, {1, 2}}, rows{{1, 0}, {2, 6}}, tail{{3, 0}, {1, 3}};
  EXPECT_EQ(boxes_of(range), (std::vector{head, rows, tail}));
  EXPECT_EQ(boxes_main_first(range), (std::vector{rows, head, tail}));
}

TEST(ReshardPlanTest, ReachesTheMostBoxesAnNDimensionalTensorCanNeed) {
  EXPECT_EQ(boxes_of({{4, 4, 4, 4}, {64, 16, 4, 1}, 1, 255}).size(), 7U);
  EXPECT_EQ(boxes_of({{4, 4, 4, 4}, {64, 16, 4, 1}, 64, 192}).size(), 1U);
}

TEST(ReshardPlanTest, ExpressesATransposedRangeInLogicalCoordinates) {
  // Memory order of {2, 3} with strides {1, 2}: (0,0) (1,0) (0,1) (1,1) (0,2) (1,2).
  EXPECT_EQ(boxes_of({{2, 3}, {1, 2}, 1, 4}), (std::vector<Box>{{{1, 0}, {1, 1}}, {{0, 1}, {2, 1}}}));
}

TEST(ReshardPlanTest, RefusesStridesThatAreNotDense) {
  const std::vector<Layout> bad = {{{2, 3}, {4, 1}}, {{2, 3}, {3, 2}}, {{2, 3}, {0, 1}},
                                   {{2, 3}, {1}},    {{2, 2}, {1, 1}}, {{2, 2}, {-2, 1}}};
  for (const auto& [shape, strides] : bad) {
    EXPECT_THROW(boxes_of({shape, strides, 0, 1}), InvalidArgument) << testing::PrintToString(strides);
  }
}

TEST(ReshardPlanTest, RefusesARangeOutsideTheTensor) {
  EXPECT_THROW(boxes_of({{4}, {1}, 0, 5}), InvalidArgument);
  EXPECT_THROW(boxes_of({{4}, {1}, -1, 2}), InvalidArgument);
  EXPECT_THROW(boxes_of({{4}, {1}, 3, 2}), InvalidArgument);
}

TEST(ReshardPlanTest, IntersectsBoxes) {
  const Box a{{1, 2}, {3, 4}};
  EXPECT_EQ(intersect(a, {{2, 0}, {5, 3}}), (Box{{2, 2}, {2, 1}}));
  EXPECT_EQ(intersect(a, {{4, 2}, {1, 4}}), std::nullopt);  // they only touch
  EXPECT_EQ(intersect(Box{}, Box{}), Box{});                // the one element of a 0-d tensor
}

TEST(ReshardPlanTest, FindsThatAProductDoesNotFit) {
  EXPECT_EQ(checked_numel(std::vector<std::int64_t>{std::int64_t{1} << 32, std::int64_t{1} << 31}), std::nullopt);
  EXPECT_EQ(checked_numel(std::vector<std::int64_t>{std::int64_t{1} << 32, std::int64_t{1} << 30}),
            std::int64_t{1} << 62);
  EXPECT_EQ(checked_numel(std::vector<std::int64_t>{3, -1}), std::nullopt);
}

}  // namespace
}  // namespace fsdp
