#include "comm/bell.h"

#include <climits>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace fsdp {

// Ringer: count the ring, then look for sleepers. Sleeper: announce itself, then read the count. In the one total order
// of these four one of the two sees the other: no ring is missed, and one that nobody waits for costs no system call.
void Bell::ring() noexcept {
  rings_.fetch_add(1);
  // Not FUTEX_PRIVATE: the sleepers may be other processes.
  if (sleepers_.load() != 0) ::syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Bell::Sleeper::Sleeper(Bell& bell) : bell_(bell) {
  bell_.sleepers_.fetch_add(1);
  seen_ = bell_.rings_.load();
}

Bell::Sleeper::~Sleeper() { bell_.sleepers_.fetch_sub(1); }

bool Bell::Sleeper::sleep(std::chrono::nanoseconds limit) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec wait{seconds.count(), (limit - seconds).count()};
  ::syscall(SYS_futex, &bell_.rings_, FUTEX_WAIT, seen_, &wait, nullptr, 0);
  return bell_.rings_.load() != seen_;
}

}  // namespace fsdp
