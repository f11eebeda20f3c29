#include "tests/comm/rank_processes.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <system_error>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/job_token.h"
#include "comm/tcp_socket.h"

namespace fsdp {
namespace {

constexpr std::chrono::seconds kLimit{20};

[[noreturn]] void run_child(int pipe, const std::map<std::string, std::string>& variables,
                            const std::function<std::string()>& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::string outcome;
  try {
    ::setenv("FSDP_CRASH_DIR", "", 1);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    outcome = body();
  } catch (const std::exception& error) {
    outcome = std::string("error: ") + error.what();
  }
  std::size_t done = 0;
  while (done < outcome.size()) {
    const ssize_t written = ::write(pipe, outcome.data() + done, outcome.size() - done);
    if (written <= 0) break;
    done += static_cast<std::size_t>(written);
  }
  ::_exit(0);  // the test program's own clean-up is not the child's
}

}  // namespace

PrivateFolder::PrivateFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "fsdp-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::system_error(errno, std::generic_category(), "mkdtemp");
  path_ = name;
}

PrivateFolder::~PrivateFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> PrivateFolder::entries() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path_))
    names.push_back(entry.path().filename());
  return names;
}

JobPlace::JobPlace(const std::filesystem::path& folder)
    : socket_(folder / "rendezvous"),
      port_(local_address(listen_at(resolve("127.0.0.1", 0).front())).port()),
      token_(to_hex(random_token())) {}

std::map<std::string, std::string> JobPlace::variables(const std::string& backend, int rank, int world_size) const {
  const std::string own = std::to_string(rank), all = std::to_string(world_size);
  return {{"RANK", own},
          {"WORLD_SIZE", all},
          {"LOCAL_RANK", own},
          {"LOCAL_WORLD_SIZE", all},
          {"FSDP_BACKEND", backend},
          {"FSDP_RENDEZVOUS", socket_},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port_)},
          {"FSDP_JOB_TOKEN", token_}};
}

RankProcesses::~RankProcesses() {
  for (int child = 0; child < static_cast<int>(children_.size()); ++child) {
    kill(child);
    if (pid(child) > 0) ::waitpid(pid(child), nullptr, 0);
    if (children_[static_cast<std::size_t>(child)].pipe >= 0) ::close(children_[static_cast<std::size_t>(child)].pipe);
  }
}

int RankProcesses::start(const std::map<std::string, std::string>& variables,
                         const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
  const pid_t pid = ::fork();
  if (pid < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (pid == 0) run_child(ends[1], variables, body);
  ::close(ends[1]);
  children_.push_back({pid, ends[0]});
  return static_cast<int>(children_.size()) - 1;
}

int RankProcesses::start_rank(int rank, int world_size, const std::filesystem::path& socket,
                              const std::function<std::string()>& body) {
  const std::string own = std::to_string(rank), all = std::to_string(world_size);
  return start(
      {{"RANK", own}, {"WORLD_SIZE", all}, {"LOCAL_RANK", own}, {"LOCAL_WORLD_SIZE", all}, {"FSDP_RENDEZVOUS", socket}},
      body);
}

void RankProcesses::kill(int child) {
  if (pid(child) > 0) ::kill(pid(child), SIGKILL);
}

std::string RankProcesses::outcome(int child) {
  Child& state = children_.at(static_cast<std::size_t>(child));
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  std::string text;
  bool hung = false;
  for (char buffer[4096]; !hung;) {
    pollfd fd{state.pipe, POLLIN, 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline -
                                                                            std::chrono::steady_clock::now());
    hung = left.count() <= 0 || ::poll(&fd, 1, static_cast<int>(left.count())) == 0;
    if (hung) break;
    const ssize_t size = ::read(state.pipe, buffer, sizeof(buffer));
    if (size <= 0) break;
    text.append(buffer, static_cast<std::size_t>(size));
  }
  if (hung) kill(child);
  int status = 0;
  ::waitpid(state.pid, &status, 0);
  state.pid = -1;
  return hung ? "hung" : WIFSIGNALED(status) ? "killed" : text;
}

}  // namespace fsdp
