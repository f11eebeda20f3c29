// `fsdp run`: the ranks of one job on this host.
#pragma once

#include <string>
#include <vector>

namespace fsdp {

struct RunOptions {
  int ranks = 1;
  std::string backend;               // "" = the program's own choice
  std::vector<std::string> command;  // program and arguments
  bool prefixes = true;              // of the ranks' output lines, where there is more than one rank
};

// Starts the ranks and returns once all have ended: 0 if all were good, else the code of the first that was not (128 + n for
// signal n). The first failure, or SIGINT, SIGTERM or SIGHUP to this process, ends the job within 5 s:
//
//   rank fails                ── 1 s ──> SIGTERM to the rest ── 3 s ──> SIGKILL    (1 s: to say what they saw)
//   signal to the launcher    ── passed on at once           ── 3 s ──> SIGKILL    (a further signal: at once)
//   output cannot be written  ── SIGTERM at once             ── 3 s ──> SIGKILL    (code 128 + SIGPIPE)
//
// With more than one rank every line of output starts with "[rN] "; a single rank has the launcher's own stdout and stderr.
// Throws InvalidArgument if the program cannot be started, std::system_error if the launcher itself fails; no rank is
// left running then either.
int run_job(const RunOptions& options);

}  // namespace fsdp
