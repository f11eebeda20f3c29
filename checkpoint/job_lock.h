// One writer per checkpoint directory.
#pragma once

#include <filesystem>

#include "checkpoint/file_system.h"

namespace fsdp {

// Holds dir/.lock (flock) as long as it lives; a crash releases it too. The file stays: its text says who held it last.
class JobLock {
 public:
  // Throws CheckpointError naming the holder's host and process id where another save holds it.
  JobLock(FileSystem& system, const std::filesystem::path& dir);

 private:
  File file_;
};

}  // namespace fsdp
