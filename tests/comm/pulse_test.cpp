// Who is taken for silent, on a clock of the test's own.
#include "comm/pulse.h"

#include <gtest/gtest.h>

namespace fsdp {
namespace {

using namespace std::chrono_literals;

constexpr Pulses::Clock::time_point kStart{1h};

// Ticks once a second; peer 0 is heard before each.
void run(Pulses& pulses, Pulses::Clock::time_point from, int seconds) {
  for (int second = 1; second <= seconds; ++second) {
    pulses.hear(0, from + second * 1s);
    pulses.tick(from + second * 1s);
  }
}

TEST(PulseTest, OnlyWhoIsNotHeardOfForThatLongIsSilent) {
  Pulses pulses(2, 5s, kStart);
  run(pulses, kStart, 5);
  EXPECT_FALSE(pulses.is_silent(1, kStart + 5s - 1ms));
  EXPECT_TRUE(pulses.is_silent(1, kStart + 5s));
  EXPECT_FALSE(pulses.is_silent(0, kStart + 5s));
  pulses.hear(1, kStart + 5s);
  EXPECT_FALSE(pulses.is_silent(1, kStart + 10s - 1ms));
}

TEST(PulseTest, ZeroIsNever) {
  Pulses pulses(2, 0s, kStart);
  run(pulses, kStart, 1000);
  EXPECT_FALSE(pulses.is_silent(1, kStart + 1000s));
}

TEST(PulseTest, ARankInADebuggerIsNotMissedUntilItIsLetGo) {
  Pulses pulses(2, 5s, kStart);
  pulses.set_traced(1, true);
  run(pulses, kStart, 100);
  EXPECT_FALSE(pulses.is_silent(1, kStart + 100s));
  pulses.set_traced(1, false);
  EXPECT_TRUE(pulses.is_silent(1, kStart + 100s));
}

TEST(PulseTest, WhoWasStoppedItselfMissesNobody) {
  Pulses pulses(2, 5s, kStart);
  pulses.tick(kStart + 100s);
  EXPECT_FALSE(pulses.is_silent(0, kStart + 105s - 1ms));
  run(pulses, kStart + 100s, 5);
  EXPECT_TRUE(pulses.is_silent(1, kStart + 105s)) << "it forgives once, not for ever";
}

// Ticks that come late, as on a busy machine, are no stop.
TEST(PulseTest, LateTicksForgiveNothing) {
  Pulses pulses(1, 5s, kStart);
  for (int tick = 1; tick <= 2; ++tick) pulses.tick(kStart + tick * kShortestSilence);
  EXPECT_TRUE(pulses.is_silent(0, kStart + 2 * kShortestSilence));
}

}  // namespace
}  // namespace fsdp
