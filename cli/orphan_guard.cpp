#include "cli/orphan_guard.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <set>

namespace fsdp {

OrphanGuard::OrphanGuard(const std::filesystem::path& directory) {
  auto pipe = make_pipe();
  pid_ = check_call(::fork(), "fork of the orphan guard");
  if (pid_ == 0) {
    pipe.write_end = UniqueFd();
    watch(pipe.read_end, directory);
  }
  messages_ = std::move(pipe.write_end);
}

OrphanGuard::~OrphanGuard() {
  messages_ = UniqueFd();
  ::waitpid(pid_, nullptr, 0);
}

void OrphanGuard::send(const Message& message) {
  // A pipe takes so few bytes whole or not at all.
  check_call(static_cast<int>(::write(messages_.get(), &message, sizeof message)), "message to the orphan guard");
}

void OrphanGuard::watch(const UniqueFd& messages, const std::filesystem::path& directory) {
  // Out of reach of Ctrl-C and of a kill of the launcher's group, and no holder of the terminal or of a pipeline.
  ::setsid();
  ::prctl(PR_SET_NAME, "fsdp-guard");
  const int nowhere = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(nowhere, fd);

  std::set<pid_t> groups;
  Message message{};
  for (ssize_t count = 0; (count = ::read(messages.get(), &message, sizeof message)) != 0;) {
    if (count < 0 && errno != EINTR) break;
    if (count != sizeof message) continue;
    if (message.alive) {
      groups.insert(message.group);
    } else {
      groups.erase(message.group);
    }
  }
  for (const auto group : groups) ::kill(-group, SIGKILL);
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
  ::_exit(0);
}

}  // namespace fsdp
