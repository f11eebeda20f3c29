#include "comm/meeting_file.h"

#include <cerrno>
#include <charconv>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <fsdp/error.h>

#include "comm/private_file.h"

namespace fsdp {
namespace {

constexpr std::string_view kFirstLine = "fsdp-meeting 1";

// Takes the next line off the text; none if it has no end.
std::optional<std::string_view> next_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end + 1);
  return line;
}

std::optional<std::string_view> value_of(std::string_view& text, std::string_view key) {
  const auto line = next_line(text);
  if (!line || !line->starts_with(key) || line->size() <= key.size() || (*line)[key.size()] != ' ') return std::nullopt;
  return line->substr(key.size() + 1);
}

std::optional<TcpAddress> to_address(std::string_view text) {
  const std::size_t space = text.find(' ');
  if (space == std::string_view::npos) return std::nullopt;
  std::uint16_t port = 0;
  const std::string_view digits = text.substr(space + 1);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size() || port == 0) return std::nullopt;
  return to_numeric_address(std::string(text.substr(0, space)), port);
}

}  // namespace

std::string to_text(const MeetingFile& file) {
  std::string text = fmt::format("{}\njob {}\ntoken {}\n", kFirstLine, file.job, to_hex(file.token));
  for (const TcpAddress& address : file.addresses) text += fmt::format("at {} {}\n", address.host(), address.port());
  return text;
}

std::optional<MeetingFile> parse_meeting_file(std::string_view text) {
  MeetingFile file;
  if (text.size() > kMaxMeetingFileBytes || next_line(text) != kFirstLine) return std::nullopt;
  const auto job = value_of(text, "job"), token = value_of(text, "token");
  const std::optional<JobToken> parsed = token ? parse_token(*token) : std::nullopt;
  if (!job || !parsed || text.empty()) return std::nullopt;
  file.job = *job;
  file.token = *parsed;
  while (!text.empty()) {
    const auto at = value_of(text, "at");
    const std::optional<TcpAddress> address = at ? to_address(*at) : std::nullopt;
    if (!address) return std::nullopt;
    file.addresses.push_back(*address);
  }
  return file;
}

void write_meeting_file(const std::filesystem::path& path, const MeetingFile& file) {
  const std::filesystem::path fresh = fmt::format("{}.{}", path.string(), ::getpid());
  const std::string text = to_text(file);
  const auto fail = [&](const char* call) {
    const int error = errno;
    ::unlink(fresh.c_str());
    throw CommunicationError(
        fmt::format("rendezvous file {}: {} failed: {}; name a file in a folder that every rank can "
                    "write to",
                    path.string(), call, std::generic_category().message(error)));
  };
  ::unlink(fresh.c_str());
  UniqueFd fd(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) fail("open");
  if (::write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) fail("write");
  if (::fsync(fd.get()) != 0) fail("fsync");  // the other hosts of a shared file system see it
  if (::rename(fresh.c_str(), path.c_str()) != 0) fail("rename");
}

std::optional<MeetingFile> read_meeting_file(const std::filesystem::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) return std::nullopt;
  if (!S_ISREG(status.st_mode) || !is_private(status)) return std::nullopt;
  std::string text(kMaxMeetingFileBytes + 1, '\0');
  const ssize_t bytes = ::read(fd.get(), text.data(), text.size());
  if (bytes < 0) return std::nullopt;
  text.resize(static_cast<std::size_t>(bytes));
  return parse_meeting_file(text);
}

}  // namespace fsdp
