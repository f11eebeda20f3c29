#include "checkpoint/job_lock.h"

#include <algorithm>

#include <unistd.h>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

// Every holder writes the same number of bytes, so that none has to cut off the rest of a longer text.
constexpr std::size_t kTextBytes = 128;

std::string holder_text() {
  char host[65] = {};
  if (::gethostname(host, sizeof host - 1) != 0) host[0] = '?';
  return fmt::format("{:<{}}\n", fmt::format("host {} pid {}", host, ::getpid()), kTextBytes - 1);
}

// What stands in the file is shown to the user: one line of printable characters, whoever wrote it.
std::string read_holder(const File& file) {
  std::string text(std::min<std::uint64_t>(file.bytes(), kTextBytes), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  std::erase_if(text, [](char c) { return c < 0x20 || c > 0x7e; });
  text.erase(text.find_last_not_of(' ') + 1);
  return text.empty() ? "an unknown process" : text;
}

}  // namespace

JobLock::JobLock(FileSystem& system, const std::filesystem::path& dir) : file_(File::open_lock(system, dir / ".lock")) {
  if (!file_.try_lock()) {
    throw CheckpointError(
        fmt::format("{} is being written by {}: wait until that save ends, or choose another directory", dir.string(),
                    read_holder(file_)));
  }
  const std::string text = holder_text();
  file_.write(0, std::as_bytes(std::span(text)));
}

}  // namespace fsdp
