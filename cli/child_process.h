// One rank of a job: a process in a process group of its own, which does not outlive the launcher.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/system_call.h"

namespace fsdp {

struct ChildOptions {
  std::vector<std::string> command;              // program (looked up in PATH) and its arguments
  std::map<std::string, std::string> variables;  // set on top of this process's environment
  bool capture_output = true;                    // stdout and stderr to pipes; else this process's own
  sigset_t signal_mask{};                        // what the child starts with
};

// How a process ended: by exit code, or by signal.
struct ExitStatus {
  int code = 0;
  int signal = 0;

  bool good() const { return code == 0 && signal == 0; }
  // The shell's convention.
  int shell_code() const { return signal != 0 ? 128 + signal : code; }
  // "exited with code 3", "was killed by signal 9 (SIGKILL)"
  std::string describe() const;
};

class ChildProcess {
 public:
  // Starts the program. Throws InvalidArgument if there is no such program or it is not executable, std::system_error for a
  // lack of resources. stdin is /dev/null: a process group that is not the terminal's would be stopped by reading it.
  explicit ChildProcess(const ChildOptions& options);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&&) = delete;
  // Kills the group if it still runs.
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  bool running() const { return !status_.has_value(); }  // until it is reaped
  // REQUIRES !running().
  const ExitStatus& status() const { return *status_; }
  // Read ends, non-blocking, to be taken once; not open where nothing is captured.
  UniqueFd take_output() { return std::move(output_); }
  UniqueFd take_error_output() { return std::move(error_output_); }

  // Sends to the whole group; nothing happens once the process was reaped.
  void signal(int number) const;
  // True from the process's end until it is reaped.
  bool has_ended() const;
  // REQUIRES has_ended(). What is left of the group is killed first, while the unreaped process still keeps the
  // group's number from being given to another.
  void reap();

 private:
  pid_t pid_ = -1;
  std::optional<ExitStatus> status_;
  UniqueFd output_, error_output_;
};

}  // namespace fsdp
