// The last calls that a rank has made of its communicator: kept at all times, at the cost of two looks at the clock for
// each, and written to a file when the group fails, since a failure may not come again.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>

#include "comm/control_block.h"

namespace fsdp {

class FlightRecorder {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kEntries = 64;

  // A call of this thread, from here to the end of the object. Any thread.
  class Call {
   public:
    Call(FlightRecorder& recorder, const Activity& activity, std::size_t bytes)
        : recorder_(recorder), number_(recorder.begin(activity, bytes)) {}
    ~Call() { recorder_.end(number_); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    FlightRecorder& recorder_;
    const std::uint64_t number_;
  };

  // A line for each call, the oldest first: its number, when it began, how long it took, its thread, what it was.
  std::string to_text(Clock::time_point now) const;

 private:
  struct Entry {
    std::uint64_t number = 0;  // counted from 1; 0 = none
    Operation operation = Operation::kNone;
    RankStatus::Label label{};
    std::size_t bytes = 0;
    int thread = 0;
    Clock::time_point begin, end;  // the same while it is not over
  };

  std::uint64_t begin(const Activity& activity, std::size_t bytes);
  void end(std::uint64_t number);
  Entry& at(std::uint64_t number) { return entries_[number % kEntries]; }

  mutable std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::array<Entry, kEntries> entries_;
};

// Writes `text` to crash-r<rank>.txt in `folder`, or to crash-r<rank>.2.txt, ... where there are files of earlier crashes.
// Returns the path. Throws std::system_error.
std::filesystem::path write_crash_file(const std::filesystem::path& folder, int rank, std::string_view text);

}  // namespace fsdp
