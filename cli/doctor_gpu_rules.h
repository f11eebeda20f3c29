// What `fsdp doctor` thinks of GPUs and their libraries. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/finding.h"

namespace fsdp {

struct GpuFacts {
  std::string name, bus_id;
  std::uint64_t memory_bytes = 0;
  std::vector<bool> reaches;  // by GPU: can read its memory directly
};

struct GpuSystemFacts {
  std::string driver_error = {};  // "libcuda.so.1: cannot open shared object file"; empty = there is a driver
  int driver_cuda = 0;            // highest CUDA that the driver supports, as 12040 for 12.4; 0 = not known
  int runtime_cuda = 0;           // of the libcudart that is found; 0 = none
  int nccl = 0;                   // as 22809 for 2.28.9; 0 = none
  int cudnn = 0;                  // as 90100 for 9.1.0; 0 = none
  std::vector<GpuFacts> gpus = {};
};

std::vector<Finding> judge_gpus(const GpuSystemFacts& facts);

}  // namespace fsdp
