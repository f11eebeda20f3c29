#include "tests/cli/program_run.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace fsdp {

namespace {

constexpr double kPatienceSeconds = 20;

std::string read_memory_file(int fd) {
  std::string text;
  std::array<char, 1 << 16> buffer;
  while (true) {
    const auto count = ::pread(fd, buffer.data(), buffer.size(), static_cast<off_t>(text.size()));
    if (count <= 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
}

}  // namespace

ProgramRun::ProgramRun(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& variables)
    : output_(check_call(::memfd_create("output", MFD_CLOEXEC), "memfd_create")),
      error_output_(check_call(::memfd_create("error output", MFD_CLOEXEC), "memfd_create")) {
  std::vector<char*> command{const_cast<char*>(FSDP_PROGRAM)};
  for (const auto& argument : arguments) command.push_back(const_cast<char*>(argument.c_str()));
  command.push_back(nullptr);
  pid_ = check_call(::fork(), "fork");
  if (pid_ == 0) {
    ::dup2(output_.get(), STDOUT_FILENO);
    ::dup2(error_output_.get(), STDERR_FILENO);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    ::execv(FSDP_PROGRAM, command.data());
    ::_exit(127);
  }
}

ProgramRun::~ProgramRun() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

std::string ProgramRun::output() const { return read_memory_file(output_.get()); }

std::vector<std::string> ProgramRun::wait_for_lines(std::size_t count) const {
  std::vector<std::string> lines;
  const bool there = eventually(kPatienceSeconds, [&] {
    lines = lines_of(output());
    return lines.size() >= count;
  });
  if (!there) throw std::runtime_error("expected " + std::to_string(count) + " lines, got: " + output());
  return lines;
}

ProgramResult ProgramRun::finish() {
  int status = 0;
  if (!eventually(kPatienceSeconds, [&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; })) {
    throw std::runtime_error("the program did not end: " + output() + read_memory_file(error_output_.get()));
  }
  pid_ = -1;
  return {.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status),
          .output = output(),
          .error_output = read_memory_file(error_output_.get())};
}

ProgramResult run_program(const std::vector<std::string>& arguments,
                          const std::map<std::string, std::string>& variables) {
  return ProgramRun(arguments, variables).finish();
}

std::vector<std::string> shell_job(int ranks, const std::string& script) {
  return {"run", "-n", std::to_string(ranks), "--", "/bin/sh", "-c", script};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

bool is_alive(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return false;
  // "pid (name) state ...", where the name may hold anything
  const auto state = text.rfind(") ");
  return state != std::string::npos && text[state + 2] != 'Z' && text[state + 2] != 'X';
}

}  // namespace fsdp
