// A word in shared memory that threads and processes sleep on until it changes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fsdp {

// Lives in memory that several processes map, so it holds no pointer and relies on lock-free atomics.
class Bell {
 public:
  // Wakes all sleepers. What they wait for must have been stored before.
  void ring() noexcept;

  // One waiter's stay at the bell. Order of use: make a Sleeper, look whether the awaited is there, only then sleep(): a
  // ring between the look and the sleep then ends the sleep at once.
  class Sleeper {
   public:
    explicit Sleeper(Bell& bell);
    ~Sleeper();
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    // True if it rang, false after `limit` or for no reason.
    bool sleep(std::chrono::nanoseconds limit);

   private:
    Bell& bell_;
    std::uint32_t seen_;
  };

 private:
  std::atomic<std::uint32_t> rings_{0};
  std::atomic<std::uint32_t> sleepers_{0};  // a killed sleeper stays counted: costs a needless system call per ring
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

}  // namespace fsdp
