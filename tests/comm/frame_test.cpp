// Which headers are refused before a byte of their payload is read.
#include "comm/frame.h"

#include <limits>

#include <gtest/gtest.h>

namespace fsdp {
namespace {

struct Sizes {
  FrameKind kind;
  Lane lane;
  std::vector<std::size_t> proper, improper;
};

constexpr std::size_t kStatusBytes = RankStatus::kWords * sizeof(std::uint64_t);
constexpr std::size_t kMost = std::numeric_limits<std::uint32_t>::max();

const std::vector<Sizes>& every_kind() {
  static const std::vector<Sizes> kinds{
      {FrameKind::kArrival, Lane::kControl, {sizeof(Arrival)}, {0, sizeof(Arrival) - 1, sizeof(Arrival) + 1, kMost}},
      {FrameKind::kWords, Lane::kControl, {8, 16, kMaxFrameBytes}, {0, 7, 9, kMaxFrameBytes + 8, kMost - 7}},
      {FrameKind::kAbort, Lane::kControl, {0, 1, kMaxFrameBytes}, {kMaxFrameBytes + 1, kMost}},
      {FrameKind::kLeave, Lane::kControl, {0}, {1, kMost}},
      {FrameKind::kDone, Lane::kControl, {0}, {1, kMost}},
      {FrameKind::kRelease, Lane::kControl, {0}, {1, kMost}},
      {FrameKind::kBeat, Lane::kControl, {kStatusBytes}, {0, kStatusBytes - 8, kStatusBytes + 8, kMost}},
      {FrameKind::kRequest, Lane::kControl, {8}, {0, 7, 9, 16, kMost}},
      {FrameKind::kReply, Lane::kBulk, {1, 4096, kMaxReplyBytes}, {0, kMaxReplyBytes + 1, kMost}},
  };
  return kinds;
}

std::string_view fault(FrameKind kind, Lane lane, std::size_t bytes) {
  return fault_of({.kind = kind, .payload_bytes = static_cast<std::uint32_t>(bytes)}, lane);
}

TEST(FrameTest, ASizeThatTheKindDoesNotHaveIsAFault) {
  for (const Sizes& sizes : every_kind()) {
    for (const std::size_t bytes : sizes.proper)
      EXPECT_EQ(fault(sizes.kind, sizes.lane, bytes), "") << static_cast<int>(sizes.kind) << " of " << bytes;
    for (const std::size_t bytes : sizes.improper)
      EXPECT_EQ(fault(sizes.kind, sizes.lane, bytes), "a message of a wrong size")
          << static_cast<int>(sizes.kind) << " of " << bytes;
  }
}

TEST(FrameTest, EachKindHasOneLane) {
  for (const Sizes& sizes : every_kind()) {
    const Lane other = sizes.lane == Lane::kControl ? Lane::kBulk : Lane::kControl;
    EXPECT_EQ(fault(sizes.kind, other, sizes.proper.front()), "a message in the wrong lane");
  }
}

TEST(FrameTest, AKindThatIsNotKnownIsAFaultInBothLanes) {
  ASSERT_EQ(every_kind().size(), static_cast<std::size_t>(FrameKind::kReply) + 1) << "the table lacks a kind";
  for (const std::uint32_t kind : {9U, 255U, std::numeric_limits<std::uint32_t>::max()}) {
    for (const Lane lane : {Lane::kControl, Lane::kBulk})
      EXPECT_EQ(fault(static_cast<FrameKind>(kind), lane, 0), "a message of no known kind");
  }
}

}  // namespace
}  // namespace fsdp
