#include "cli/doctor_rules.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "comm/launch_environment.h"

namespace fsdp {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20, kGiB = std::uint64_t{1} << 30;

std::string size(std::uint64_t bytes) {
  if (bytes == kUnlimited) return "unlimited";
  if (bytes >= 10 * kGiB) return fmt::format("{:.0f} GiB", static_cast<double>(bytes) / static_cast<double>(kGiB));
  if (bytes >= kGiB) return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / static_cast<double>(kGiB));
  return fmt::format("{} MiB", bytes / kMiB);
}

std::string count(std::uint64_t number) { return number == kUnlimited ? "unlimited" : std::to_string(number); }

// libfsdp opens some 10 descriptors for each peer; a training opens its data besides.
constexpr std::uint64_t kFilesOfAProcess = 256, kFilesOfAPeer = 16;
constexpr std::uint64_t kThreadsOfARank = 64;

struct KnownVariable {
  const char* name;
  bool is_for_debugging;  // slows down, or works around a fault that should be found
  const char* meaning;
};
// NCCL's own guide parts its variables into those of a system and those for debugging, "not for production":
// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
constexpr std::array kKnownVariables{
    KnownVariable{"NCCL_SOCKET_IFNAME", false, "the interface of NCCL's sockets"},
    KnownVariable{"GLOO_SOCKET_IFNAME", false, "the interface of Gloo's sockets"},
    KnownVariable{"NCCL_IB_HCA", false, "the InfiniBand adapters that NCCL uses"},
    KnownVariable{"NCCL_IB_GID_INDEX", false, "the RoCE address that NCCL uses"},
    KnownVariable{"NCCL_IB_DISABLE", true, "1 turns InfiniBand off: sockets are several times slower"},
    KnownVariable{"NCCL_P2P_DISABLE", true, "1 sends what GPUs exchange through host memory"},
    KnownVariable{"NCCL_P2P_LEVEL", true, "narrows which GPUs exchange directly"},
    KnownVariable{"NCCL_SHM_DISABLE", true, "1 sends what processes exchange through sockets"},
    KnownVariable{"NCCL_NET_GDR_LEVEL", true, "narrows which adapters reach GPU memory directly"},
    KnownVariable{"NCCL_BUFFSIZE", true, "the bytes of a buffer; NCCL's own choice is made for the hardware"},
    KnownVariable{"NCCL_MIN_NCHANNELS", true, "takes cores of the GPU from computation"},
    KnownVariable{"NCCL_MAX_NCHANNELS", true, "may keep NCCL from filling the links"},
    KnownVariable{"NCCL_ALGO", true, "fixes the algorithm for every size"},
    KnownVariable{"NCCL_PROTO", true, "fixes the protocol for every size"},
    KnownVariable{"NCCL_CUMEM_ENABLE", true, "how NCCL allocates"},
    KnownVariable{"NCCL_NVLS_ENABLE", true, "0 turns off sums in the switch"},
    KnownVariable{"NCCL_DEBUG_SUBSYS", true, "prints much"},
    KnownVariable{"CUDA_LAUNCH_BLOCKING", true, "1 makes every kernel wait for the one before"},
    KnownVariable{"CUDA_VISIBLE_DEVICES", false, "the GPUs that this process sees"},
    KnownVariable{"MALLOC_CHECK_", true, "slows every allocation down"},
};

}  // namespace

Finding judge_shm(const ShmFacts& facts) {
  if (!facts.is_there) {
    return {Verdict::kWarn, "shm", "no /dev/shm", "programs that share memory by name need it; libfsdp itself does not",
            "mount a tmpfs there"};
  }
  const std::string found = fmt::format("{} in /dev/shm, {} free", size(facts.total_bytes), size(facts.free_bytes));
  if (facts.total_bytes <= 64 * kMiB) {
    return {
        Verdict::kWarn, "shm", found,
        "64 MiB is what a container gets by default: NCCL allocates some 10 MB there for each pair of GPUs, and data "
        "loaders more",
        "start the container with --shm-size=1g or --ipc=host"};
  }
  if (facts.free_bytes < 64 * kMiB)
    return {Verdict::kWarn, "shm", found, "it is nearly full, perhaps of what killed jobs have left",
            "look at ls -l /dev/shm"};
  return {Verdict::kOk, "shm", found};
}

std::vector<Finding> judge_limits(const LimitFacts& facts, int ranks) {
  std::vector<Finding> findings;
  const std::uint64_t files = kFilesOfAProcess + kFilesOfAPeer * static_cast<std::uint64_t>(ranks);
  const bool few_files = facts.open_files < files;
  findings.push_back({few_files ? Verdict::kFail : Verdict::kOk, "open_files", count(facts.open_files) + " at most",
                      few_files ? fmt::format("{} ranks need about {} each", ranks, files) : "",
                      few_files ? "ulimit -n 65536, or docker run --ulimit nofile=65536" : ""});
  const std::uint64_t processes = kThreadsOfARank * static_cast<std::uint64_t>(ranks);
  const bool few_processes = facts.processes < processes;
  findings.push_back(
      {few_processes ? Verdict::kWarn : Verdict::kOk, "processes", count(facts.processes) + " at most",
       few_processes ? fmt::format("threads count as processes, and {} ranks may start {}", ranks, processes) : "",
       few_processes ? "ulimit -u 65536" : ""});
  const bool little_locked = facts.locked_bytes < 64 * kMiB;
  findings.push_back({little_locked ? Verdict::kWarn : Verdict::kOk, "locked_memory",
                      size(facts.locked_bytes) + " at most",
                      little_locked ? "InfiniBand and pinned host memory need more; on CPUs alone nothing does" : "",
                      little_locked ? "ulimit -l unlimited, or docker run --ulimit memlock=-1" : ""});
  return findings;
}

Finding judge_memory(const MemoryFacts& facts) {
  std::string found = fmt::format("{} of {} available", size(facts.available_bytes), size(facts.total_bytes));
  if (facts.cgroup_limit_bytes == kUnlimited || facts.cgroup_limit_bytes >= facts.total_bytes)
    return facts.available_bytes * 10 < facts.total_bytes
               ? Finding{Verdict::kWarn, "memory", found, "other programs hold the rest",
                         "see who with: ps aux --sort -rss"}
               : Finding{Verdict::kOk, "memory", found};
  found += fmt::format("; the cgroup allows {}, of which {} is used", size(facts.cgroup_limit_bytes),
                       size(facts.cgroup_used_bytes));
  return {Verdict::kWarn, "memory", found, "a rank that takes more is killed without a word",
          "plan with the cgroup's figure, or raise it (docker run --memory, Slurm --mem)"};
}

Finding judge_cpu(const CpuFacts& facts) {
  const int threads = facts.ranks * (facts.omp_threads > 0 ? facts.omp_threads : facts.cores);
  std::string found = fmt::format("{} of {} cores", facts.cores, facts.online);
  if (facts.quota > 0) found += fmt::format(", a quota of {:.1f}", facts.quota);
  found += facts.omp_threads > 0 ? fmt::format(", OMP_NUM_THREADS={}", facts.omp_threads) : ", OMP_NUM_THREADS not set";
  const double usable = facts.quota > 0 ? std::min<double>(facts.quota, facts.cores) : facts.cores;
  if (threads <= usable || (facts.ranks == 1 && facts.omp_threads == 0 && facts.quota == 0))
    return {Verdict::kOk, "cpu", found};
  return {Verdict::kWarn, "cpu", found,
          fmt::format("{} rank(s) would run {} threads on {:.0f} cores, and wait for each other", facts.ranks, threads,
                      usable),
          fmt::format("OMP_NUM_THREADS={}, as fsdp run sets it", std::max(1, static_cast<int>(usable) / facts.ranks))};
}

Finding judge_host_name(const HostNameFacts& facts) {
  std::string found = fmt::format(
      "{} is {}", facts.name,
      facts.addresses.empty() ? "unknown" : fmt::format("{}", fmt::join(facts.addresses, ", ")));
  found += facts.interfaces.empty() ? "; no interface but loopback"
                                    : fmt::format("; interfaces {}", fmt::join(facts.interfaces, ", "));
  const Verdict bad = facts.needs_network ? Verdict::kFail : Verdict::kWarn;
  if (facts.interfaces.empty())
    return facts.needs_network
               ? Finding{bad, "host_name", found, "other hosts cannot reach this one", "set an interface up"}
               : Finding{Verdict::kOk, "host_name", found};
  if (!facts.chosen.empty()) return {Verdict::kOk, "host_name", found + "; FSDP_SOCKET_IFNAME=" + facts.chosen};
  if (facts.addresses.empty() || facts.all_loopback) {
    return {bad, "host_name", found,
            "who asks for this host by its name, as NCCL and Gloo do, gets an address that other hosts cannot reach",
            "put its real address in /etc/hosts, or set FSDP_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"};
  }
  return {Verdict::kOk, "host_name", found};
}

Finding judge_port(const PortFacts& facts) {
  const std::string found = fmt::format("{}={}", facts.variable, facts.port);
  if (facts.holder.empty()) return {Verdict::kOk, "port", found + " is free"};
  return {Verdict::kFail, "port", fmt::format("{} is held by {}", found, facts.holder), "rank 0 cannot listen there",
          "end that program, or set another port"};
}

Finding judge_kernel(const KernelFacts& facts) {
  const std::string found = "Linux " + facts.release;
  if (!facts.has_pidfd || !facts.has_memfd)
    return {Verdict::kFail, "kernel", found, "shm needs memfd_create and pidfd_open (Linux 5.3)",
            "a newer kernel, or tcp"};
  if (facts.major < 5 || (facts.major == 5 && facts.minor < 14))
    return {Verdict::kOk, "kernel", found + " (memory is taken page by page before 5.14: start-up is slower)"};
  return {Verdict::kOk, "kernel", found};
}

Finding judge_folder(const FolderFacts& facts) {
  std::string found = facts.path;
  if (!facts.file_system.empty()) found += " on " + facts.file_system;
  if (!facts.error.empty())
    return {Verdict::kFail, "checkpoint_folder", found + ": " + facts.error, "no checkpoint can be written there",
            "name another folder with --folder, or free it"};
  found += fmt::format(", {} free, writes {:.0f} MB/s", size(facts.free_bytes), facts.write_bytes_per_second * 1e-6);
  if (!facts.renames_atomically || !facts.excludes || !facts.syncs_folders) {
    return {Verdict::kFail, "checkpoint_folder", found,
            fmt::format("it does not {}: a checkpoint could be lost or mixed",
                        !facts.renames_atomically ? "rename folders as a whole"
                        : !facts.excludes         ? "let one of two win that make the same file"
                                                  : "sync folders"),
            "a local or parallel file system"};
  }
  if (facts.file_system.starts_with("nfs")) {
    return {Verdict::kWarn, "checkpoint_folder", found, "other hosts may see a rename on NFS late, or half of it",
            "mount it with lookupcache=positive and actimeo=1, or use a parallel file system"};
  }
  if (facts.free_bytes < kGiB || facts.free_inodes < 1000)
    return {Verdict::kWarn, "checkpoint_folder", found, "a checkpoint needs 12 bytes for each parameter and more",
            "free space"};
  return {Verdict::kOk, "checkpoint_folder", found};
}

std::vector<Finding> judge_variables(const Variables& variables) {
  std::vector<Finding> findings;
  for (const KnownVariable& known : kKnownVariables) {
    const auto variable = variables.find(known.name);
    if (variable == variables.end()) continue;
    const std::string found = fmt::format("{}={}", known.name, variable->second);
    findings.push_back(
        known.is_for_debugging
            ? Finding{Verdict::kWarn, "variable", found, known.meaning, "unset it once the fault is found"}
            : Finding{Verdict::kOk, "variable", fmt::format("{} ({})", found, known.meaning)});
  }
  return findings;
}

Finding judge_launch(const Variables& variables) {
  try {
    const LaunchIdentity self = identify(variables, -1, -1);
    return {Verdict::kOk, "launch",
            self.launcher.empty() ? "no launcher's variables: one rank"
                                  : fmt::format("rank {} of {} (from {})", self.rank, self.world_size, self.launcher)};
  } catch (const InvalidArgument& error) {
    return {Verdict::kFail, "launch", error.what(), "fsdp::init refuses to guess",
            "start with a launcher, or unset them"};
  }
}

std::vector<Finding> judge_differences(const std::vector<std::vector<Finding>>& by_rank) {
  // Who says what, by check; a check may have several lines, which count as one text.
  std::map<std::string, std::map<std::string, std::vector<std::size_t>>> texts;
  std::vector<std::string> order;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    std::map<std::string, std::string> own;
    for (const Finding& finding : by_rank[rank]) {
      if (std::find(order.begin(), order.end(), finding.id) == order.end()) order.push_back(finding.id);
      std::string& text = own[finding.id];
      text += (text.empty() ? "" : "; ") + finding.found;
    }
    for (const auto& [id, text] : own) texts[id][text].push_back(rank);
  }
  constexpr std::array kMayDiffer{"launch", "memory", "host_name", "port", "shm", "checkpoint_folder"};
  std::vector<Finding> findings;
  for (const std::string& id : order) {
    std::size_t speakers = 0;
    std::string found;
    for (const auto& [text, ranks] : texts[id]) {
      speakers += ranks.size();
      found += fmt::format("{}rank {}: {}", found.empty() ? "" : " | ", fmt::join(ranks, ", "), text);
    }
    const bool same = texts[id].size() == 1 && speakers == by_rank.size();
    const bool may = std::find(kMayDiffer.begin(), kMayDiffer.end(), id) != kMayDiffer.end();
    if (same || may) continue;
    findings.push_back({id == "variable" ? Verdict::kFail : Verdict::kWarn, id + "_differs", found,
                        "ranks that differ wait for the slowest, or do not understand each other",
                        "make them the same on every host"});
  }
  return findings;
}

}  // namespace fsdp
