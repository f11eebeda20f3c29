// The messages that ranks without shared memory send each other: a header, then its payload. Byte order is the machine's,
// x86-64 only.
//
//   kind      lane     a        b       c       payload
//   arrival   control  meeting                  Arrival
//   words     control  region   index           the words, in the order in which they are set
//   abort     control  culprit                  the reason, text
//   leave     control
//   done      control                           (to one that leaves: nothing of it is wanted any more)
//   release   control  region
//   beat      control  traced                   RankStatus::words(); once a second
//   request   control  id       region  offset  how many bytes, a std::uint64_t
//   reply     bulk     id                       those bytes
//
// The bulk lane is a connection of its own, so that small messages never wait behind large ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "comm/control_block.h"

namespace fsdp {

enum class FrameKind : std::uint32_t { kArrival, kWords, kAbort, kLeave, kDone, kRelease, kBeat, kRequest, kReply };

enum class Lane : std::uint32_t { kControl, kBulk };

struct FrameHeader {
  FrameKind kind = FrameKind::kLeave;
  std::uint32_t payload_bytes = 0;
  std::uint64_t a = 0, b = 0, c = 0;
};
static_assert(sizeof(FrameHeader) == 32);

struct Arrival {
  Call call;
  std::int32_t error = 0;
  std::uint32_t unused = 0;
};

inline constexpr std::size_t kMaxFrameBytes = std::size_t{64} << 10;  // payload in the control lane
inline constexpr std::size_t kMaxReplyBytes = std::size_t{1} << 20;

// Why a header that came in this lane cannot be one of ours; empty if it can. Pure.
std::string_view fault_of(const FrameHeader& header, Lane lane);

}  // namespace fsdp
