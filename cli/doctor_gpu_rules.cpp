#include "cli/doctor_gpu_rules.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace fsdp {
namespace {

std::string cuda_version(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string nccl_version(int version) {
  // 2.8 and older count 100 for a minor version, newer ones 10,000 for a major one.
  return version < 10'000 ? fmt::format("{}.{}.{}", version / 1000, version / 100 % 10, version % 100)
                          : fmt::format("{}.{}.{}", version / 10'000, version / 100 % 100, version % 100);
}

// A driver runs programs of its own CUDA version and older; of its own major version also newer ones, as far as they use
// nothing new (NVIDIA, "CUDA Compatibility", minor version compatibility).
Finding judge_driver(const GpuSystemFacts& facts) {
  if (facts.runtime_cuda == 0)
    return {Verdict::kOk, "cuda",
            fmt::format("the driver supports CUDA {}; no libcudart found", cuda_version(facts.driver_cuda))};
  const std::string found = fmt::format("the driver supports CUDA {}, the runtime is {}",
                                        cuda_version(facts.driver_cuda), cuda_version(facts.runtime_cuda));
  if (facts.driver_cuda / 1000 < facts.runtime_cuda / 1000)
    return {Verdict::kFail, "cuda", found, "no kernel will run",
            fmt::format("update the driver, or use libraries for CUDA {}", facts.driver_cuda / 1000)};
  if (facts.driver_cuda < facts.runtime_cuda)
    return {Verdict::kWarn, "cuda", found, "what is new in the runtime does not work", "update the driver"};
  return {Verdict::kOk, "cuda", found};
}

void judge_models(const std::vector<GpuFacts>& gpus, std::vector<Finding>& findings) {
  std::set<std::string> names;
  std::uint64_t smallest = ~std::uint64_t{0};
  for (const GpuFacts& gpu : gpus) {
    names.insert(gpu.name);
    smallest = std::min(smallest, gpu.memory_bytes);
  }
  const std::string found = fmt::format("{} GPU(s): {}, {:.0f} GiB", gpus.size(), fmt::join(names, ", "),
                                        static_cast<double>(smallest) / static_cast<double>(std::uint64_t{1} << 30));
  findings.push_back(names.size() == 1
                         ? Finding{Verdict::kOk, "gpus", found}
                         : Finding{Verdict::kWarn, "gpus", found, "the slowest and smallest decides for all",
                                   "CUDA_VISIBLE_DEVICES with GPUs of one model"});
}

void judge_reach(const std::vector<GpuFacts>& gpus, std::vector<Finding>& findings) {
  std::vector<std::string> apart;
  for (std::size_t a = 0; a < gpus.size(); ++a) {
    for (std::size_t b = a + 1; b < gpus.size() && b < gpus[a].reaches.size(); ++b) {
      if (!gpus[a].reaches[b]) apart.push_back(fmt::format("{}-{}", a, b));
    }
  }
  if (gpus.size() < 2) return;
  findings.push_back(
      apart.empty() ? Finding{Verdict::kOk, "peer_access", "every GPU reads every other's memory directly"}
                    : Finding{Verdict::kWarn, "peer_access", fmt::format("not between GPUs {}", fmt::join(apart, ", ")),
                              "what they exchange goes through host memory",
                              "see nvidia-smi topo -m; in a virtual machine ACS or the IOMMU may forbid it"});
}

}  // namespace

std::vector<Finding> judge_gpus(const GpuSystemFacts& facts) {
  if (!facts.driver_error.empty())
    return {{Verdict::kOk, "gpus", "none that can be used (" + facts.driver_error + ")"}};
  if (facts.gpus.empty())
    return {{Verdict::kWarn, "gpus", "a driver, but no GPU", "a container may not have been given any",
             "docker run --gpus all"}};
  std::vector<Finding> findings;
  judge_models(facts.gpus, findings);
  findings.push_back(judge_driver(facts));
  judge_reach(facts.gpus, findings);
  findings.push_back({Verdict::kOk, "gpu_libraries",
                      fmt::format("NCCL {}, cuDNN {}", facts.nccl == 0 ? "not found" : nccl_version(facts.nccl),
                                  facts.cudnn == 0 ? "not found"
                                                   : fmt::format("{}.{}.{}", facts.cudnn / 10'000,
                                                                 facts.cudnn / 100 % 100, facts.cudnn % 100))});
  return findings;
}

}  // namespace fsdp
