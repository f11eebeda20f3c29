// `fsdp doctor`: looks at this machine as a training would find it, and says what is wrong and what to do.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <fsdp/context.h>

#include "cli/finding.h"

namespace fsdp {

struct DoctorOptions {
  int ranks = 1;                       // that are to run on this host
  std::filesystem::path folder = ".";  // of the checkpoints; what is written there is removed again
  bool exchanges = true;               // try how ranks exchange bytes, over threads of this process
};

// Looks at everything, within 20 s. Never throws for what it finds. Needs neither root nor a GPU, nor LibTorch.
std::vector<Finding> examine(const DoctorOptions& options);

// Collective: each rank examines its own host. On rank 0 its findings and, at the end, what differs between ranks; nothing
// elsewhere.
std::vector<Finding> examine_together(const Context& context, DoctorOptions options);

// GPUs, their driver and libraries, as far as they are there; loaded at run time, so nothing has to be installed.
std::vector<Finding> examine_gpus();

}  // namespace fsdp
