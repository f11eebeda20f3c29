#include "benchmarks/worker_group.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

namespace fsdp {

namespace {

static_assert(std::is_trivially_copyable_v<Measurement>, "travels through a pipe");

struct Pipe {
  int reader = -1, writer = -1;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe to a worker");
  return {ends[0], ends[1]};
}

// Both are far smaller than what a pipe takes at once, so neither is ever cut. False at the end of the other side.
template <class T>
bool receive(int fd, T& value) {
  return ::read(fd, &value, sizeof value) == static_cast<ssize_t>(sizeof value);
}
template <class T>
bool send(int fd, const T& value) {
  return ::write(fd, &value, sizeof value) == static_cast<ssize_t>(sizeof value);
}

std::filesystem::path make_directory() {
  std::string pattern = std::filesystem::temp_directory_path() / "fsdp-bench-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr)
    throw std::system_error(errno, std::generic_category(), "making " + pattern);
  return pattern;
}

void set_launch_variables(int rank, int world_size, const std::filesystem::path& directory) {
  const std::pair<const char*, std::string> variables[] = {
      {"RANK", std::to_string(rank)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(world_size)},
      {"LOCAL_WORLD_SIZE", std::to_string(world_size)},
      {"FSDP_RENDEZVOUS", directory / "rendezvous"},
  };
  for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), /*overwrite=*/1);
}

// The life of a worker. _exit leaves alone what the parent's atexit handlers and buffers hold.
[[noreturn]] void serve(int commands, int answers, const std::function<Block()>& prepare) {
  try {
    const Block block = prepare();
    for (int steps = 0; receive(commands, steps) && send(answers, block(steps));) {
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "benchmark worker {}: {}\n", ::getpid(), error.what());
    ::_exit(1);
  }
  ::_exit(0);
}

}  // namespace

WorkerGroup::WorkerGroup(int world_size, const std::function<Block()>& prepare) : directory_(make_directory()) {
  for (int rank = 0; rank < world_size; ++rank) start(rank, world_size, prepare);
}

void WorkerGroup::start(int rank, int world_size, const std::function<Block()>& prepare) {
  const auto commands = make_pipe(), answers = make_pipe();
  std::fflush(nullptr);
  const auto pid = ::fork();
  if (pid < 0) throw std::system_error(errno, std::generic_category(), "fork of a worker");
  if (pid == 0) {
    // An inherited write end would keep an elder sibling waiting for commands that never come.
    for (const auto& elder : workers_) {
      ::close(elder.commands);
      ::close(elder.answers);
    }
    ::close(commands.writer);
    ::close(answers.reader);
    set_launch_variables(rank, world_size, directory_);
    serve(commands.reader, answers.writer, prepare);
  }
  ::close(commands.reader);
  ::close(answers.writer);
  workers_.push_back({pid, commands.writer, answers.reader});
}

WorkerGroup::~WorkerGroup() {
  for (const auto& worker : workers_) ::close(worker.commands);
  for (const auto& worker : workers_) {
    ::close(worker.answers);
    ::waitpid(worker.pid, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

Measurement WorkerGroup::run(int steps) {
  for (const auto& worker : workers_) {
    if (!send(worker.commands, steps))
      throw std::runtime_error(fmt::format("worker {} takes no commands any more", worker.pid));
  }
  Measurement result;
  for (std::size_t rank = 0; rank < workers_.size(); ++rank) {
    Measurement measurement;
    if (!receive(workers_[rank].answers, measurement)) {
      throw std::runtime_error(
          fmt::format("worker {} (pid {}) ended in the middle of a block", rank, workers_[rank].pid));
    }
    const double slowest = std::max(result.seconds, measurement.seconds);
    if (rank == 0) result = measurement;
    result.seconds = slowest;
  }
  return result;
}

}  // namespace fsdp
