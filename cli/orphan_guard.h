// Cleans up after a launcher that can no longer do it itself.
#pragma once

#include <sys/types.h>

#include <filesystem>

#include "cli/system_call.h"

namespace fsdp {

// A small process beside the launcher. Once the launcher has ended, however it ended (kill -9 too), the guard kills the process
// groups that are still registered and removes the job's directory. A parent-death signal alone would end a rank that is
// a shell but not the program which that shell runs.
class OrphanGuard {
 public:
  // REQUIRES that this process has one thread. Takes over `directory`.
  explicit OrphanGuard(const std::filesystem::path& directory);
  OrphanGuard(const OrphanGuard&) = delete;
  OrphanGuard& operator=(const OrphanGuard&) = delete;
  // Returns once the guard has done its work.
  ~OrphanGuard();

  void add(pid_t group) { send({group, true}); }
  // To be called before the group's leader is reaped: later the number may be another's.
  void remove(pid_t group) { send({group, false}); }

 private:
  struct Message {
    pid_t group;
    bool alive;
  };
  void send(const Message& message);
  [[noreturn]] static void watch(const UniqueFd& messages, const std::filesystem::path& directory);

  pid_t pid_ = -1;
  UniqueFd messages_;
};

}  // namespace fsdp
