// The signals that a launcher lives by, as something to poll.
#pragma once

#include <signal.h>

#include <optional>

#include "cli/system_call.h"

namespace fsdp {

struct ReceivedSignal {
  int number = 0;
  pid_t sender = 0;  // for SIGCHLD the child; of several children that ended at once only the first is told
};

// While it lives, SIGCHLD, SIGINT, SIGTERM and SIGHUP are blocked and read from here, and SIGPIPE is ignored. A signal that
// this process was told to ignore (nohup) stays ignored.
class SignalSource {
 public:
  SignalSource();
  SignalSource(const SignalSource&) = delete;
  SignalSource& operator=(const SignalSource&) = delete;
  ~SignalSource();

  int fd() const { return fd_.get(); }
  std::optional<ReceivedSignal> next();
  // The mask of before, which children are to have.
  const sigset_t& original_mask() const { return original_mask_; }

 private:
  UniqueFd fd_;
  sigset_t original_mask_{};
  struct sigaction original_pipe_action_ {};
};

}  // namespace fsdp
