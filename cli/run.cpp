#include "cli/run.h"

#include <poll.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include "cli/child_process.h"
#include "cli/job_environment.h"
#include "cli/orphan_guard.h"
#include "cli/output_prefixer.h"
#include "cli/signal_source.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kReportTime = std::chrono::seconds(1);
constexpr auto kTerminateTime = std::chrono::seconds(3);

// The launcher's own stdout or stderr. Once a write has failed (the reader of a pipe is gone) the rest is dropped, so that
// the ranks can still be ended in good order.
class Destination {
 public:
  explicit Destination(int fd) : fd_(fd) {}

  bool is_terminal() const { return ::isatty(fd_) == 1; }
  int error() const { return error_; }

  void write(std::string_view bytes) {
    while (!bytes.empty() && error_ == 0) {
      const auto count = ::write(fd_, bytes.data(), bytes.size());
      if (count >= 0) {
        bytes.remove_prefix(static_cast<std::size_t>(count));
      } else if (errno == EAGAIN) {
        pollfd writable{.fd = fd_, .events = POLLOUT, .revents = 0};
        ::poll(&writable, 1, -1);
      } else if (errno != EINTR) {
        error_ = errno;
      }
    }
  }

 private:
  int fd_;
  int error_ = 0;
};

// One output stream of one rank on its way to the launcher's own.
class OutputRelay {
 public:
  OutputRelay(UniqueFd source, Destination& destination, const std::string& prefix)
      : source_(std::move(source)), prefixer_(prefix, destination.is_terminal(), [&destination](std::string_view line) {
          destination.write(line);
        }) {}

  bool is_open() const { return static_cast<bool>(source_); }
  int fd() const { return source_.get(); }

  // Passes on what there is now, at most one buffer of it. False if there was nothing.
  bool relay() {
    if (!is_open()) return false;
    std::array<char, 1 << 16> buffer;
    const auto count = ::read(source_.get(), buffer.data(), buffer.size());
    if (count > 0) {
      prefixer_.feed({buffer.data(), static_cast<std::size_t>(count)});
      return true;
    }
    if (count == 0) close();
    return false;
  }
  // A process outside the rank's group may hold the other end for ever, so what is there by now has to do.
  void drain() {
    while (relay()) {
    }
    close();
  }

 private:
  void close() {
    if (!is_open()) return;
    source_ = UniqueFd();
    prefixer_.finish();
  }

  UniqueFd source_;
  OutputPrefixer prefixer_;
};

struct Rank {
  int index;
  ChildProcess process;
  OutputRelay output, error_output;
};

class Job {
 public:
  explicit Job(const RunOptions& options)
      : environment_(make_job_environment(options.ranks, options.backend)), guard_(environment_.directory) {
    ranks_.reserve(static_cast<std::size_t>(options.ranks));
    for (int index = 0; index < options.ranks; ++index) start(index, options);
  }

  int run() {
    while (running() > 0) {
      wait_for_event();
      while (const auto signal = signals_.next()) handle(*signal);
      if (phase_ == Phase::kRunning && output_error() != 0) enter(Phase::kTerminating, SIGTERM);
      if (phase_ != Phase::kRunning && Clock::now() >= deadline_) escalate();
    }
    return conclude();
  }

 private:
  // kReporting: a rank has failed, the rest may still say what they saw. kTerminating: they were asked to end.
  enum class Phase { kRunning, kReporting, kTerminating, kKilled };
  struct Failure {
    int rank;
    pid_t pid;
    ExitStatus status;
    int others_running;
  };

  void start(int index, const RunOptions& options) {
    ChildProcess process({.command = options.command,
                          .variables = environment_.variables(index, std::getenv("OMP_NUM_THREADS") != nullptr),
                          .capture_output = options.ranks > 1 && options.prefixes,
                          .signal_mask = signals_.original_mask()});
    guard_.add(process.pid());
    const auto prefix = fmt::format("[r{}] ", index);
    OutputRelay output(process.take_output(), stdout_, prefix);
    OutputRelay error_output(process.take_error_output(), stderr_, prefix);
    ranks_.push_back({index, std::move(process), std::move(output), std::move(error_output)});
  }

  int output_error() const { return stdout_.error() != 0 ? stdout_.error() : stderr_.error(); }

  int running() const {
    return static_cast<int>(
        std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.process.running(); }));
  }
  int still_working() const {
    return static_cast<int>(std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
      return rank.process.running() && !rank.process.has_ended();
    }));
  }

  void wait_for_event() {
    std::vector<pollfd> events{{.fd = signals_.fd(), .events = POLLIN, .revents = 0}};
    std::vector<OutputRelay*> relays;
    for (auto& rank : ranks_) {
      for (auto* relay : {&rank.output, &rank.error_output}) {
        if (!relay->is_open()) continue;
        events.push_back({.fd = relay->fd(), .events = POLLIN, .revents = 0});
        relays.push_back(relay);
      }
    }
    const int count = ::poll(events.data(), events.size(), milliseconds_to_deadline());
    if (count < 0 && errno != EINTR) check_call(count, "poll");
    for (std::size_t i = 0; count > 0 && i < relays.size(); ++i) {
      if (events[i + 1].revents != 0) relays[i]->relay();
    }
  }

  int milliseconds_to_deadline() const {
    if (phase_ == Phase::kRunning || phase_ == Phase::kKilled) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
    return static_cast<int>(std::max<std::chrono::milliseconds::rep>(0, left.count()));
  }

  void handle(const ReceivedSignal& signal) {
    if (signal.number == SIGCHLD) {
      // The named child ended first, so it is asked first: the first failure is the job's.
      for (auto& rank : ranks_) {
        if (rank.process.pid() == signal.sender) reap(rank);
      }
      for (auto& rank : ranks_) reap(rank);
    } else if (phase_ == Phase::kTerminating) {
      enter(Phase::kKilled, SIGKILL);
    } else if (phase_ != Phase::kKilled) {
      if (!failure_) received_signal_ = signal.number;
      enter(Phase::kTerminating, signal.number);
    }
  }

  void reap(Rank& rank) {
    if (!rank.process.has_ended()) return;
    guard_.remove(rank.process.pid());
    rank.process.reap();
    rank.output.drain();
    rank.error_output.drain();
    if (!rank.process.status().good() && !failure_ && phase_ == Phase::kRunning) {
      failure_ = {rank.index, rank.process.pid(), rank.process.status(), still_working()};
      enter(Phase::kReporting, 0);
    }
  }

  void escalate() {
    if (phase_ == Phase::kReporting) {
      enter(Phase::kTerminating, SIGTERM);
    } else if (phase_ == Phase::kTerminating) {
      enter(Phase::kKilled, SIGKILL);
    }
  }

  void enter(Phase phase, int signal) {
    phase_ = phase;
    deadline_ = Clock::now() + (phase == Phase::kReporting ? kReportTime : kTerminateTime);
    if (signal == 0) return;
    for (auto& rank : ranks_) {
      rank.process.signal(signal);
      // A stopped process would not see it.
      rank.process.signal(SIGCONT);
    }
  }

  // The job's exit code; says why where it is not 0.
  int conclude() {
    if (failure_) {
      stderr_.write(describe(*failure_));
      return failure_->status.shell_code();
    }
    if (received_signal_ != 0) {
      stderr_.write(fmt::format("fsdp run: SIG{} received; all ranks were ended\n", ::sigabbrev_np(received_signal_)));
      return 128 + received_signal_;
    }
    if (output_error() != 0) {
      stderr_.write(
          fmt::format("fsdp run: cannot write output: {}; all ranks were ended\n", ::strerror(output_error())));
      return 128 + SIGPIPE;
    }
    return 0;
  }

  std::string describe(const Failure& failure) const {
    const auto others = static_cast<int>(ranks_.size()) - 1;
    const auto text = fmt::format("fsdp run: rank {} (pid {}) {}", failure.rank, failure.pid,
                                  failure.status.describe());
    if (failure.others_running == 0) return text + "\n";
    if (others == 1) return text + "; the other rank was ended\n";
    if (failure.others_running == others) return fmt::format("{}; the other {} ranks were ended\n", text, others);
    return fmt::format("{}; {} of the other {} ranks still ran and were ended\n", text, failure.others_running, others);
  }

  // In the order of their making: the ranks end first, then the guard, and signals are ours until both are gone.
  Destination stdout_{STDOUT_FILENO}, stderr_{STDERR_FILENO};
  SignalSource signals_;
  JobEnvironment environment_;
  OrphanGuard guard_;
  std::vector<Rank> ranks_;
  Phase phase_ = Phase::kRunning;
  Clock::time_point deadline_;
  std::optional<Failure> failure_;
  int received_signal_ = 0;
};

}  // namespace

int run_job(const RunOptions& options) { return Job(options).run(); }

}  // namespace fsdp
