#include "sharding/timeline.h"

#include <gtest/gtest.h>

namespace fsdp {
namespace {

const StepPlan::Run* touch(Timeline& timeline, std::vector<int> units) { return timeline.touch(units).run; }

// Forward over the given units, backward in reverse with one gradient each; whether every run was a planned one.
bool pass(Timeline& timeline, const std::vector<int>& units) {
  bool planned = true;
  for (const int unit : units) planned &= touch(timeline, {unit}) != nullptr;
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
    if (unit != units.rbegin()) planned &= touch(timeline, {*unit}) != nullptr;
    timeline.arrive(*unit, 0, false);
  }
  timeline.finish_step();
  return planned;
}

TEST(TimelineTest, RunsTheFirstStepOnDemandAndPlansTheSecond) {
  Timeline timeline({{1}, {1}, {1}}, 1);
  EXPECT_FALSE(pass(timeline, {0, 1, 2}));
  EXPECT_TRUE(pass(timeline, {0, 1, 2}));
  EXPECT_TRUE(pass(timeline, {0, 1, 2}));
}

// A unit of two parameters of which a step uses one: a plan ends its round at that one, unless rounds are to be whole.
TEST(TimelineTest, LeavesTheEndOfARoundThatIsNotWholeToTheOneWhoCutsIt) {
  for (const bool whole_rounds : {false, true}) {
    Timeline timeline({{2}, {1}}, 1, whole_rounds);
    for (int step = 0; step < 3; ++step) {
      touch(timeline, {0});
      touch(timeline, {1});
      EXPECT_TRUE(timeline.arrive(1, 0, false).ends);
      EXPECT_EQ(touch(timeline, {0}) != nullptr, step > 0);
      EXPECT_EQ(timeline.arrive(0, 1, false).ends, step > 0 && !whole_rounds);
      if (whole_rounds) timeline.cut_round(0);
      // Cut where the plan ends it, too, so the step goes on with the plan.
      touch(timeline, {1});
      EXPECT_EQ(timeline.arrive(1, 0, false).packs, true);
      timeline.finish_step();
    }
  }
}

TEST(TimelineTest, CollapsesRepeatedTouchesHoweverManyThereAre) {
  Timeline timeline({{1}, {1}}, 1);
  for (const int touches : {3, 50, 1}) {
    for (int i = 0; i < touches; ++i) timeline.touch(std::vector{0});
    timeline.touch(std::vector{1});
    timeline.arrive(1, 0, false);
    const bool planned = touch(timeline, {0}) != nullptr;
    timeline.arrive(0, 0, false);
    timeline.finish_step();
    EXPECT_EQ(planned, touches != 3) << "shapes change the count of touches, not the plan";
  }
}

TEST(TimelineTest, FallsBackToDemandWhereAStepDeviatesAndPlansTheNewPattern) {
  Timeline timeline({{1}, {1}, {1}}, 1);
  pass(timeline, {0, 1, 2});
  EXPECT_FALSE(pass(timeline, {0, 2}));
  EXPECT_TRUE(pass(timeline, {0, 2}));
}

TEST(TimelineTest, PredictsPatternsThatAlternate) {
  Timeline timeline({{1}, {1}, {1}}, 1);
  for (int i = 0; i < 2; ++i) {
    pass(timeline, {0, 1});
    pass(timeline, {0, 2});
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(pass(timeline, {0, 1}));
    EXPECT_TRUE(pass(timeline, {0, 2}));
  }
}

TEST(TimelineTest, EndsARoundWhenAllHaveComeOrOneComesAgain) {
  Timeline timeline({{.trainable = 2}}, 1);
  timeline.touch(std::vector{0});
  EXPECT_FALSE(timeline.arrive(0, 0, false).ends);
  EXPECT_TRUE(timeline.arrive(0, 1, false).ends);
  EXPECT_FALSE(timeline.arrive(0, 1, false).ends);
  EXPECT_TRUE(timeline.arrive(0, 1, false).ends_previous);
}

TEST(TimelineTest, EndsAPlannedRoundAtItsLastUsedParameter) {
  Timeline timeline({{.trainable = 3}}, 1);  // the third parameter is never used
  for (int step = 0; step < 2; ++step) {
    timeline.touch(std::vector{0});
    EXPECT_FALSE(timeline.arrive(0, 0, false).ends);
    EXPECT_EQ(timeline.arrive(0, 1, false).ends, step == 1);
    timeline.finish_step();
  }
}

TEST(TimelineTest, KeepsAFewPatternsOnly) {
  Timeline timeline(std::vector<PlannedUnit>(13, {.trainable = 1}), 1);
  for (int round = 0; round < 3; ++round) {
    for (int unit = 1; unit < 13; ++unit) pass(timeline, {0, unit});
  }
  // More patterns than are kept: each comes back as a new one, and nothing but speed is lost.
  EXPECT_FALSE(pass(timeline, {0, 1}));
  EXPECT_TRUE(pass(timeline, {0, 1}));
}

TEST(TimelineTest, KnowsTheLastLocalRoundOfAPlannedStep) {
  Timeline timeline({{.trainable = 1, .keeps_parameters = true, .keeps_gradients = true}}, 1);
  for (const int backwards : {3, 3, 3, 2}) {
    const bool planned = timeline.last_plan() != nullptr;
    std::vector<bool> last;
    timeline.touch(std::vector{0});
    for (int i = 0; i < backwards; ++i) last.push_back(timeline.arrive(0, 0, true).last);
    timeline.finish_step();
    std::vector<bool> expected(last.size());
    if (planned && backwards == 3) expected.back() = true;
    EXPECT_EQ(last, expected);
  }
}

TEST(TimelineTest, LeavesAPlanWhereGradientsBeginToAccumulateLocally) {
  Timeline timeline({{.trainable = 1}, {.trainable = 1}}, 1);
  pass(timeline, {0, 1});
  EXPECT_TRUE(timeline.touch(std::vector{0}).run != nullptr);
  EXPECT_TRUE(timeline.touch(std::vector{1}).run != nullptr);
  timeline.arrive(1, 0, true);
  EXPECT_TRUE(timeline.touch(std::vector{0}).run == nullptr);
}

}  // namespace
}  // namespace fsdp
