#include "sharding/owner_placement.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>
#include <rapidcheck.h>

namespace fsdp {
namespace {

// NOTE [Owner placement].
TEST(OwnerPlacementTest, MatchesItsDrawing) {
  EXPECT_EQ(place_owners({7, 5, 4, 4, 2}, 2), (std::vector<int>{0, 1, 1, 0, 1}));
}

TEST(OwnerPlacementTest, GivesEqualPiecesInTurn) {
  EXPECT_EQ(place_owners({3, 3, 3, 3, 3}, 3), (std::vector<int>{0, 1, 2, 0, 1}));
  EXPECT_EQ(place_owners({1, 1}, 4), (std::vector<int>{0, 1}));
  EXPECT_TRUE(place_owners({}, 2).empty());
}

TEST(OwnerPlacementTest, StaysWithinItsBoundForAnyWork) {
  EXPECT_TRUE(rc::check("the heaviest rank has at most the mean and one piece", [] {
    const int ranks = *rc::gen::inRange(1, 9);
    const auto work = *rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange<std::int64_t>(0, 1000));
    const std::vector<int> owners = place_owners(work, ranks);
    std::vector<std::int64_t> load(static_cast<std::size_t>(ranks));
    for (std::size_t i = 0; i < work.size(); ++i) load[static_cast<std::size_t>(owners[i])] += work[i];
    const std::int64_t total = std::accumulate(work.begin(), work.end(), std::int64_t{0});
    const std::int64_t largest = work.empty() ? 0 : *std::max_element(work.begin(), work.end());
    RC_ASSERT(*std::max_element(load.begin(), load.end()) <= total / ranks + largest);
  }));
}

}  // namespace
}  // namespace fsdp
