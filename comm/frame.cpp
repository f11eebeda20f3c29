#include "comm/frame.h"

namespace fsdp {
namespace {

bool has_proper_size(const FrameHeader& header) {
  const std::size_t bytes = header.payload_bytes;
  switch (header.kind) {
    case FrameKind::kArrival: return bytes == sizeof(Arrival);
    case FrameKind::kWords: return bytes != 0 && bytes % sizeof(std::uint64_t) == 0 && bytes <= kMaxFrameBytes;
    case FrameKind::kAbort: return bytes <= kMaxFrameBytes;
    case FrameKind::kLeave:
    case FrameKind::kDone:
    case FrameKind::kRelease: return bytes == 0;
    case FrameKind::kBeat: return bytes == RankStatus::kWords * sizeof(std::uint64_t);
    case FrameKind::kRequest: return bytes == sizeof(std::uint64_t);
    case FrameKind::kReply: return bytes != 0 && bytes <= kMaxReplyBytes;
  }
  return false;
}

}  // namespace

std::string_view fault_of(const FrameHeader& header, Lane lane) {
  if (header.kind > FrameKind::kReply) return "a message of no known kind";
  if ((header.kind == FrameKind::kReply) != (lane == Lane::kBulk)) return "a message in the wrong lane";
  return has_proper_size(header) ? "" : "a message of a wrong size";
}

}  // namespace fsdp
