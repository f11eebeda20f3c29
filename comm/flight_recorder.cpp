#include "comm/flight_recorder.h"

#include <cerrno>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "comm/system_call.h"
#include "comm/unique_fd.h"

namespace fsdp {
namespace {

constexpr int kMaxCrashFiles = 100;  // of a rank in one folder

int own_thread() {
  thread_local const int id = ::gettid();
  return id;
}

double seconds(FlightRecorder::Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

std::uint64_t FlightRecorder::begin(const Activity& activity, std::size_t bytes) {
  const int thread = own_thread();
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  at(++last_) = {.number = last_,
                 .operation = activity.operation,
                 .label = RankStatus::end_of(activity.label),
                 .bytes = bytes,
                 .thread = thread,
                 .begin = now,
                 .end = now};
  return last_;
}

void FlightRecorder::end(std::uint64_t number) {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (Entry& entry = at(number); entry.number == number) entry.end = now;  // else others have taken its place
}

std::string FlightRecorder::to_text(Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (std::size_t i = 1; i <= kEntries; ++i) {
    const Entry& entry = entries_[(last_ + i) % kEntries];
    if (entry.number == 0) continue;
    const std::string took = entry.end == entry.begin ? "not over"
                                                      : fmt::format("{:.6f}", seconds(entry.end - entry.begin));
    text += fmt::format("{:>10} {:>12.6f} {:>12} {:>8}  {}{}\n", entry.number, seconds(entry.begin - now), took,
                        entry.thread, describe({entry.operation, RankStatus::text_of(entry.label)}),
                        entry.bytes == 0 ? "" : fmt::format(", {} bytes", entry.bytes));
  }
  return text;
}

std::filesystem::path write_crash_file(const std::filesystem::path& folder, int rank, std::string_view text) {
  for (int i = 1; i <= kMaxCrashFiles; ++i) {
    const auto path = folder / fmt::format("crash-r{}{}.txt", rank, i == 1 ? "" : fmt::format(".{}", i));
    const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!file && errno == EEXIST) continue;
    if (!file || ::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
      throw_errno("write " + path.string());
    return path;
  }
  throw std::system_error(EEXIST, std::generic_category(),
                          fmt::format("{} of them in {}", kMaxCrashFiles, folder.string()));
}

}  // namespace fsdp
