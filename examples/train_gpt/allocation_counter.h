// Counts the bytes of CPU tensors, exactly: a peak that resident set size, which sees pages and caches, cannot give.
#pragma once

#include <atomic>
#include <cstddef>

#include <c10/core/Allocator.h>

namespace gpt {

// Not counted: memory that LibTorch takes beside its allocator (inside MKL and oneDNN), and what a library maps itself.
class AllocationCounter final : public c10::Allocator {
 public:
  // Makes a counter LibTorch's CPU allocator. Call once, before the first tensor that is to be counted. The counter is never
  // destroyed: tensors may be freed as late as in destructors of static objects.
  static AllocationCounter& install();

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, std::size_t count) const override;

  std::size_t live_bytes() const { return live_.load(); }
  std::size_t peak_bytes() const { return peak_.load(); }
  // From here on the peak is that of what follows.
  void reset_peak() { peak_ = live_.load(); }

 private:
  struct Header;
  static void release(void* data);

  std::atomic<std::size_t> live_{0}, peak_{0};
};

}  // namespace gpt
