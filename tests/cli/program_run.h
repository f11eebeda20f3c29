// One run of the `fsdp` program by a test.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "cli/system_call.h"

namespace fsdp {

struct ProgramResult {
  int exit_code = -1;  // 128 + n for signal n
  std::string output, error_output;
};

class ProgramRun {
 public:
  explicit ProgramRun(const std::vector<std::string>& arguments,
                      const std::map<std::string, std::string>& variables = {});
  ProgramRun(const ProgramRun&) = delete;
  ProgramRun& operator=(const ProgramRun&) = delete;
  ~ProgramRun();

  pid_t pid() const { return pid_; }
  std::string output() const;
  // Returns once stdout has `count` lines; throws after 20 s.
  std::vector<std::string> wait_for_lines(std::size_t count) const;
  // Waits for the program's end; throws after 20 s.
  ProgramResult finish();

 private:
  UniqueFd output_, error_output_;
  pid_t pid_ = -1;
};

// The program run to its end.
ProgramResult run_program(const std::vector<std::string>& arguments,
                          const std::map<std::string, std::string>& variables = {});

// `fsdp run -n ranks -- sh -c script`
std::vector<std::string> shell_job(int ranks, const std::string& script);

std::vector<std::string> lines_of(const std::string& text);

// False for a process that is gone or waits to be reaped.
bool is_alive(pid_t pid);

// True if `condition` came to hold within `seconds`.
template <class Condition>
bool eventually(double seconds, Condition condition) {
  for (int i = 0; i < seconds * 100; ++i) {
    if (condition()) return true;
    ::usleep(10'000);
  }
  return condition();
}

}  // namespace fsdp
