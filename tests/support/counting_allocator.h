// Counts the bytes of LibTorch's CPU allocations of this process, live and at their peak. What the engine's segments
// take is not among them: RunRanksOptions::on_record tells of those.
#pragma once

#include <cstddef>

namespace fsdp::testing {

class CountingAllocator {
 public:
  // Puts itself in place of LibTorch's allocator, once per process. Call before the first tensor is made.
  static CountingAllocator& install();
  std::size_t live_bytes() const;
  std::size_t peak_bytes() const;
  void reset_peak();
  std::size_t allocations() const;  // since install

  // From here on this thread's allocations are counted, and number `failing` of them (0 = the first) throws what LibTorch's
  // own allocator throws where there is no memory. Returns by stop_failing() how many there were.
  static void fail_at(std::size_t failing);
  static std::size_t stop_failing();
};

}  // namespace fsdp::testing
