#include "cli/child_process.h"

#include <fcntl.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {

namespace {

// What the child needs between fork and exec, made before the fork.
struct ExecPlan {
  std::vector<char*> arguments;
  std::vector<std::string> assignments;  // "NAME=value"
  int output = -1, error_output = -1;    // -1 = inherited
  int failure = -1;                      // errno of a failed exec goes here
  const sigset_t* signal_mask = nullptr;
  pid_t parent = -1;
};

void point_at(int from, int to) {
  if (from >= 0) ::dup2(from, to);
}

[[noreturn]] void run_child(ExecPlan& plan) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The launcher may have died before the request was in place.
  if (::getppid() != plan.parent) ::_exit(128 + SIGKILL);
  point_at(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  point_at(plan.output, STDOUT_FILENO);
  point_at(plan.error_output, STDERR_FILENO);
  for (auto& assignment : plan.assignments) ::putenv(assignment.data());
  ::signal(SIGPIPE, SIG_DFL);
  ::sigprocmask(SIG_SETMASK, plan.signal_mask, nullptr);
  ::execvp(plan.arguments[0], plan.arguments.data());
  const int error = errno;
  [[maybe_unused]] const auto written = ::write(plan.failure, &error, sizeof error);
  ::_exit(127);
}

std::string explain_failed_exec(const std::string& program, int error) {
  if (error == ENOENT) {
    return fmt::format(
        "cannot start '{}': no such program, or its interpreter is missing; give a path (./train) or a name that is in "
        "PATH",
        program);
  }
  if (error == EACCES) {
    return fmt::format("cannot start '{}': not an executable file; name a program, or make it one with chmod +x",
                       program);
  }
  return fmt::format("cannot start '{}': {}", program, ::strerror(error));
}

// Returns once the child runs the program; the pipe's other end is closed by that.
void wait_for_exec(const UniqueFd& failure, const std::string& program) {
  int error = 0;
  ssize_t count = 0;
  do {
    count = ::read(failure.get(), &error, sizeof error);
  } while (count < 0 && errno == EINTR);
  if (count == sizeof error) throw InvalidArgument(explain_failed_exec(program, error));
}

void set_non_blocking(const UniqueFd& fd) {
  check_call(::fcntl(fd.get(), F_SETFL, O_NONBLOCK), "fcntl of a rank's pipe");
}

}  // namespace

Pipe make_pipe() {
  int ends[2];
  check_call(::pipe2(ends, O_CLOEXEC), "pipe");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::string ExitStatus::describe() const {
  if (signal == 0) return fmt::format("exited with code {}", code);
  const char* name = ::sigabbrev_np(signal);
  return fmt::format("was killed by signal {} ({})", signal, name ? fmt::format("SIG{}", name) : "unnamed");
}

ChildProcess::ChildProcess(const ChildOptions& options) {
  ExecPlan plan;
  for (const auto& argument : options.command) plan.arguments.push_back(const_cast<char*>(argument.c_str()));
  plan.arguments.push_back(nullptr);
  for (const auto& [name, value] : options.variables) plan.assignments.push_back(name + "=" + value);
  plan.signal_mask = &options.signal_mask;
  plan.parent = ::getpid();

  auto failure = make_pipe();
  plan.failure = failure.write_end.get();
  Pipe output, error_output;
  if (options.capture_output) {
    output = make_pipe();
    error_output = make_pipe();
    set_non_blocking(output.read_end);
    set_non_blocking(error_output.read_end);
    plan.output = output.write_end.get();
    plan.error_output = error_output.write_end.get();
  }

  pid_ = check_call(::fork(), "fork of a rank");
  if (pid_ == 0) run_child(plan);
  // Also here, so that the group exists whichever of the two runs first.
  ::setpgid(pid_, pid_);
  output_ = std::move(output.read_end);
  error_output_ = std::move(error_output.read_end);
  failure.write_end = UniqueFd();
  try {
    wait_for_exec(failure.read_end, options.command.front());
  } catch (...) {
    ::waitpid(pid_, nullptr, 0);
    throw;
  }
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      status_(other.status_),
      output_(std::move(other.output_)),
      error_output_(std::move(other.error_output_)) {}

ChildProcess::~ChildProcess() {
  if (pid_ < 0 || !running()) return;
  ::kill(-pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void ChildProcess::signal(int number) const {
  if (running()) ::kill(-pid_, number);
}

bool ChildProcess::has_ended() const {
  siginfo_t info{};
  return running() && ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == pid_;
}

void ChildProcess::reap() {
  ::kill(-pid_, SIGKILL);
  int status = 0;
  check_call(::waitpid(pid_, &status, 0), "waitpid of a rank");
  status_ = WIFSIGNALED(status) ? ExitStatus{.signal = WTERMSIG(status)} : ExitStatus{.code = WEXITSTATUS(status)};
}

}  // namespace fsdp
