#include "cli/signal_source.h"

#include <sys/signalfd.h>

namespace fsdp {

SignalSource::SignalSource() {
  sigset_t mask;
  ::sigemptyset(&mask);
  ::sigaddset(&mask, SIGCHLD);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    ::sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_IGN) ::sigaddset(&mask, number);
  }
  fd_ = UniqueFd(check_call(::signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK), "signalfd"));
  check_call(::sigprocmask(SIG_BLOCK, &mask, &original_mask_), "sigprocmask");
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &original_pipe_action_);
}

SignalSource::~SignalSource() {
  ::sigaction(SIGPIPE, &original_pipe_action_, nullptr);
  ::sigprocmask(SIG_SETMASK, &original_mask_, nullptr);
}

std::optional<ReceivedSignal> SignalSource::next() {
  signalfd_siginfo info{};
  if (::read(fd_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
  return ReceivedSignal{static_cast<int>(info.ssi_signo), static_cast<pid_t>(info.ssi_pid)};
}

}  // namespace fsdp
