// What `fsdp doctor` thinks of what it is told about a machine. Pure: the same facts, the same words.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/finding.h"

namespace fsdp {

using Variables = std::map<std::string, std::string>;

inline constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};

struct ShmFacts {
  bool is_there = false;
  std::uint64_t total_bytes = 0, free_bytes = 0;
};
Finding judge_shm(const ShmFacts& facts);

struct LimitFacts {
  std::uint64_t open_files = kUnlimited, processes = kUnlimited, locked_bytes = kUnlimited;
};
std::vector<Finding> judge_limits(const LimitFacts& facts, int ranks);

struct MemoryFacts {
  std::uint64_t total_bytes = 0, available_bytes = 0;
  std::uint64_t cgroup_limit_bytes = kUnlimited, cgroup_used_bytes = 0;
};
Finding judge_memory(const MemoryFacts& facts);

struct CpuFacts {
  int cores = 1;        // that this process may use
  int online = 1;       // of the machine
  double quota = 0;     // of the cgroup, in cores; 0 = none
  int ranks = 1;        // that will run here
  int omp_threads = 0;  // OMP_NUM_THREADS; 0 = not set
};
Finding judge_cpu(const CpuFacts& facts);

struct HostNameFacts {
  std::string name = {};
  std::vector<std::string> addresses = {};   // that the name stands for
  bool all_loopback = false;                 // of those
  std::vector<std::string> interfaces = {};  // that are up and no loopback, with their address
  std::string chosen = {};                   // FSDP_SOCKET_IFNAME
  bool needs_network = false;                // ranks on several hosts
};
Finding judge_host_name(const HostNameFacts& facts);

struct PortFacts {
  int port = 0;
  std::string variable;  // that names it
  std::string holder;    // empty = free
};
Finding judge_port(const PortFacts& facts);

struct KernelFacts {
  int major = 0, minor = 0;
  std::string release;
  bool has_pidfd = true, has_memfd = true;
};
Finding judge_kernel(const KernelFacts& facts);

struct FolderFacts {
  std::string path;
  std::string error = {};        // of the first step that failed: "mkdir: Permission denied"; empty = all went well
  std::string file_system = {};  // "ext4", "nfs"
  bool renames_atomically = true, syncs_folders = true,
       excludes = true;  // rename(2) onto a name, fsync of a folder, O_EXCL
  double write_bytes_per_second = 0;
  std::uint64_t free_bytes = 0, free_inodes = 0;
};
Finding judge_folder(const FolderFacts& facts);

// Variables of NCCL, Gloo and LibTorch that change how ranks talk or compute: those that are set, with a word for each that
// is for looking for faults and should not stay.
std::vector<Finding> judge_variables(const Variables& variables);

// The launcher's variables of this process: who it would be.
Finding judge_launch(const Variables& variables);

// Of several ranks: findings whose text differs between them, one line each with who says what.
std::vector<Finding> judge_differences(const std::vector<std::vector<Finding>>& by_rank);

}  // namespace fsdp
