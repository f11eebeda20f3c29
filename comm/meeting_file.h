// Where rank 0 listens, and with which token, in a file that all ranks can reach.
//
//   fsdp-meeting 1
//   job <what tells this start apart>
//   token <64 hexadecimal digits>
//   at <address> <port>                  once or several times
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "comm/tcp_meeting.h"

namespace fsdp {

struct MeetingFile {
  std::string job;  // one line, may be empty
  JobToken token{};
  std::vector<TcpAddress> addresses;
};

inline constexpr std::size_t kMaxMeetingFileBytes = 16'384;

std::string to_text(const MeetingFile& file);
// None for what is no such file, or only a part of one. Pure.
std::optional<MeetingFile> parse_meeting_file(std::string_view text);

// Appears whole, readable by this user alone, in place of what was there. Throws CommunicationError.
void write_meeting_file(const std::filesystem::path& path, const MeetingFile& file);
// None if it is not there, not whole, another user's, or can be written by others.
std::optional<MeetingFile> read_meeting_file(const std::filesystem::path& path);

}  // namespace fsdp
