#include "cli/doctor.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <thread>

#include <fsdp/error.h>
#include <fsdp/testing.h>

#include "cli/bench_comm.h"
#include "cli/doctor_rules.h"
#include "comm/launch_environment.h"
#include "comm/port_holder.h"
#include "comm/tcp_socket.h"
#include "comm/unique_fd.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

std::optional<std::uint64_t> number_in(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::uint64_t number = 0;
  return stream >> number ? std::optional(number) : std::nullopt;
}

std::string value_of(const Variables& variables, const char* name) {
  const auto it = variables.find(name);
  return it == variables.end() ? "" : it->second;
}

int integer_of(const Variables& variables, const char* name) {
  const std::string text = value_of(variables, name);
  int value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// The folder of this process's cgroup (version 2); empty where there is none.
std::filesystem::path cgroup() {
  std::ifstream stream("/proc/self/cgroup");
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with("0::")) return std::filesystem::path("/sys/fs/cgroup") / line.substr(4);
  }
  return {};
}

ShmFacts shm_facts() {
  struct statvfs status {};
  if (::statvfs("/dev/shm", &status) != 0) return {};
  return {true, status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize};
}

LimitFacts limit_facts() {
  const auto limit_of = [](__rlimit_resource resource) {
    rlimit limit{};
    ::getrlimit(resource, &limit);
    return limit.rlim_cur == RLIM_INFINITY ? kUnlimited : limit.rlim_cur;
  };
  return {limit_of(RLIMIT_NOFILE), limit_of(RLIMIT_NPROC), limit_of(RLIMIT_MEMLOCK)};
}

MemoryFacts memory_facts() {
  MemoryFacts facts;
  std::ifstream stream("/proc/meminfo");
  for (std::string line; std::getline(stream, line);) {
    std::istringstream fields(line);
    std::string key;
    std::uint64_t kibibytes = 0;
    fields >> key >> kibibytes;
    if (key == "MemTotal:") facts.total_bytes = kibibytes << 10;
    if (key == "MemAvailable:") facts.available_bytes = kibibytes << 10;
  }
  // The tightest of the cgroup and those around it.
  for (std::filesystem::path folder = cgroup(); folder.has_relative_path() && folder != "/sys/fs/cgroup";
       folder = folder.parent_path()) {
    const auto limit = number_in(folder / "memory.max");
    if (!limit || *limit >= facts.cgroup_limit_bytes) continue;
    facts.cgroup_limit_bytes = *limit;
    facts.cgroup_used_bytes = number_in(folder / "memory.current").value_or(0);
  }
  return facts;
}

CpuFacts cpu_facts(const Variables& variables, int ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  ::sched_getaffinity(0, sizeof(cores), &cores);
  CpuFacts facts{.cores = std::max(1, CPU_COUNT(&cores)),
                 .online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)),
                 .ranks = ranks,
                 .omp_threads = integer_of(variables, "OMP_NUM_THREADS")};
  double quota = 0, period = 0;
  if (std::ifstream stream(cgroup() / "cpu.max"); stream >> quota >> period && period > 0) facts.quota = quota / period;
  return facts;
}

HostNameFacts host_name_facts(const Variables& variables) {
  HostNameFacts facts{.chosen = value_of(variables, "FSDP_SOCKET_IFNAME")};
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  facts.name = name.data();
  facts.all_loopback = true;
  try {
    for (const TcpAddress& address : resolve(facts.name, 0)) {
      facts.addresses.push_back(address.host());
      facts.all_loopback = facts.all_loopback && address.is_loopback();
    }
  } catch (const InvalidArgument&) {  // unknown: no addresses
  }
  try {
    facts.interfaces.push_back(own_address(facts.chosen).host());
  } catch (const InvalidArgument&) {  // none but loopback, or not that one
  }
  try {
    const LaunchIdentity self = identify(variables, -1, -1);
    facts.needs_network = self.local_world_size != -1 && self.local_world_size < self.world_size;
  } catch (const InvalidArgument&) {  // judge_launch says so
  }
  return facts;
}

std::optional<PortFacts> port_facts(const Variables& variables) {
  for (const char* name : {"FSDP_MASTER_PORT", "MASTER_PORT"}) {
    const int port = integer_of(variables, name);
    if (port > 0 && port < 65'536) return PortFacts{port, name, holder_of_port(static_cast<std::uint16_t>(port))};
  }
  return std::nullopt;
}

KernelFacts kernel_facts() {
  utsname system{};
  ::uname(&system);
  KernelFacts facts{.release = system.release};
  std::sscanf(system.release, "%d.%d", &facts.major, &facts.minor);
  facts.has_pidfd = static_cast<bool>(UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0))));
  facts.has_memfd = static_cast<bool>(UniqueFd(::memfd_create("fsdp", MFD_CLOEXEC)));
  return facts;
}

std::string file_system_of(const std::filesystem::path& folder) {
  struct statfs status {};
  if (::statfs(folder.c_str(), &status) != 0) return {};
  struct Magic {
    long number;
    const char* name;
  };
  constexpr Magic kMagics[] = {{0xef53, "ext4"},      {0x58465342, "xfs"},     {0x9123683e, "btrfs"},
                               {0x01021994, "tmpfs"}, {0x6969, "nfs"},         {0x0bd00bd0, "lustre"},
                               {0x65735546, "fuse"},  {0x794c7630, "overlay"}, {0x47504653, "gpfs"},
                               {0x2fc12fc1, "zfs"},   {0xff534d42, "cifs"},    {0xfe534d42, "smb2"}};
  for (const Magic& magic : kMagics) {
    if (static_cast<long>(status.f_type) == magic.number) return magic.name;
  }
  return fmt::format("type 0x{:x}", static_cast<unsigned long>(status.f_type));
}

std::string error_text(const char* call) { return fmt::format("{}: {}", call, std::strerror(errno)); }

// Does what a save does, in a folder of its own: files, fsync, a rename of a folder, a file that one alone may make.
FolderFacts folder_facts(const std::filesystem::path& folder) {
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  FolderFacts facts{.path = folder.string(), .file_system = file_system_of(folder)};
  std::string own = (folder / ".fsdp-doctor-XXXXXX").string();
  if (::mkdtemp(own.data()) == nullptr) {
    facts.error = error_text("mkdir");
    return facts;
  }
  const std::filesystem::path trial(own);
  const std::function<bool()> write_file = [&] {
    const std::vector<char> block(std::size_t{1} << 20, 'x');
    const auto begin = Clock::now();
    const UniqueFd file(::open((trial / "file").c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file) return facts.error = error_text("open"), false;
    for (std::size_t done = 0; done < kBytes; done += block.size()) {
      if (::write(file.get(), block.data(), block.size()) != static_cast<ssize_t>(block.size()))
        return facts.error = error_text("write"), false;
    }
    if (::fsync(file.get()) != 0) return facts.error = error_text("fsync"), false;
    facts.write_bytes_per_second = kBytes / std::chrono::duration<double>(Clock::now() - begin).count();
    return true;
  };
  if (write_file()) {
    facts.excludes = ::open((trial / "file").c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600) < 0 &&
                     errno == EEXIST;
    std::error_code error;
    std::filesystem::create_directory(trial / "a", error);
    facts.renames_atomically = !error && ::rename((trial / "a").c_str(), (trial / "b").c_str()) == 0;
    const UniqueFd self(::open(trial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    facts.syncs_folders = self && ::fsync(self.get()) == 0;
  }
  std::error_code ignored;
  std::filesystem::remove_all(trial, ignored);
  struct statvfs status {};
  if (::statvfs(folder.c_str(), &status) == 0) {
    facts.free_bytes = status.f_bavail * status.f_frsize;
    facts.free_inodes = status.f_files == 0 ? kUnlimited : status.f_favail;
  }
  return facts;
}

// Known integers over every backend of this host, ranks as threads.
std::vector<Finding> examine_exchanges(int ranks) {
  std::vector<Finding> findings;
  for (const char* backend : {"shm", "tcp"}) {
    const std::string id = std::string("exchange_") + backend;
    try {
      std::int64_t wrong = 0;
      double seconds = 0;
      run_ranks(std::clamp(ranks, 2, 4),
                [&](const Context& context) {
                  const auto begin = Clock::now();
                  const std::int64_t own = count_wrong_exchanges(context, std::size_t{1} << 20);
                  if (context.is_main()) {
                    wrong = own;
                    seconds = std::chrono::duration<double>(Clock::now() - begin).count();
                  }
                },
                {.backend = backend, .timeout = std::chrono::seconds(5)});
      findings.push_back(wrong == 0
                             ? Finding{Verdict::kOk, id, fmt::format("right sums, {:.0f} ms in all", seconds * 1e3)}
                             : Finding{Verdict::kFail, id, fmt::format("{} wrong elements", wrong),
                                       "training would be wrong", "test this machine's memory"});
    } catch (const Error& error) {
      findings.push_back(
          {Verdict::kFail, id, error.what(), "ranks of this host cannot meet over it", "see the message"});
    }
  }
  return findings;
}

}  // namespace

std::vector<Finding> examine(const DoctorOptions& options) {
  const Variables variables = process_variables();
  std::vector<Finding> findings;
  const auto add = [&](std::vector<Finding> more) {
    findings.insert(findings.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  };
  add({judge_kernel(kernel_facts()), judge_cpu(cpu_facts(variables, options.ranks)), judge_memory(memory_facts()),
       judge_shm(shm_facts())});
  add(judge_limits(limit_facts(), options.ranks));
  add({judge_host_name(host_name_facts(variables)), judge_launch(variables)});
  if (const auto port = port_facts(variables)) add({judge_port(*port)});
  add(judge_variables(variables));
  add({judge_folder(folder_facts(options.folder))});
  add(examine_gpus());
  if (options.exchanges) add(examine_exchanges(options.ranks));
  return findings;
}

std::vector<Finding> examine_together(const Context& context, DoctorOptions options) {
  Communicator& communicator = context.communicator();
  // The ranks of a host would disturb each other; what they exchange is tried by all of them, at the end.
  options.exchanges = false;
  const std::string own = to_json(examine(options));
  auto bytes = static_cast<std::int64_t>(own.size());
  communicator.all_reduce(reinterpret_cast<std::byte*>(&bytes), 1, DType::kInt64, ReduceOp::kMax);
  std::string padded = own, all(static_cast<std::size_t>(bytes * context.world_size()), ' ');
  padded.resize(static_cast<std::size_t>(bytes), ' ');
  communicator.all_gather(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
  const std::int64_t wrong = count_wrong_exchanges(context, std::size_t{1} << 20);
  if (!context.is_main()) return {};
  std::vector<std::vector<Finding>> by_rank;
  for (std::int64_t rank = 0; rank < context.world_size(); ++rank)
    by_rank.push_back(
        parse_findings(all.substr(static_cast<std::size_t>(rank * bytes), static_cast<std::size_t>(bytes))));
  std::vector<Finding> findings = by_rank[0];
  findings.push_back(wrong == 0 ? Finding{Verdict::kOk, "exchange", "right sums over " + context.backend()}
                                : Finding{Verdict::kFail, "exchange",
                                          fmt::format("{} wrong elements over {}", wrong, context.backend()),
                                          "training would be wrong", "test the memory and network of these machines"});
  std::vector<Finding> differences = judge_differences(by_rank);
  if (differences.empty())
    differences.push_back(
        {Verdict::kOk, "ranks", fmt::format("nothing differs between the {} ranks", context.world_size())});
  findings.insert(findings.end(), differences.begin(), differences.end());
  // What only another rank has found wrong is said, too.
  for (std::size_t rank = 1; rank < by_rank.size(); ++rank) {
    for (Finding& finding : by_rank[rank]) {
      const bool is_known = std::any_of(by_rank[0].begin(), by_rank[0].end(), [&](const Finding& first) {
        return first.id == finding.id && first.verdict == finding.verdict;
      });
      if (finding.verdict == Verdict::kOk || is_known) continue;
      finding.found = fmt::format("rank {}: {}", rank, finding.found);
      findings.push_back(std::move(finding));
    }
  }
  return findings;
}

}  // namespace fsdp
