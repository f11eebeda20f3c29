#include "comm/launch_environment.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

struct Launcher {
  const char* name;
  std::array<const char*, 4> names;  // rank, ranks; local rank, local ranks
  bool tells_local = true;           // else the last two may lack
  std::vector<const char*> job = {};
  const char* step = nullptr;  // no other variable is read where this one is unset
  bool sizes_by_node = false;  // the last name is a list, of each node
};
enum Name { kRank, kRanks, kLocalRank, kLocalRanks };

const std::vector<const char*> kMeeting{"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID",
                                        "TORCHELASTIC_RESTART_COUNT"};

// In a batch script, or a shell of salloc, a part of the names is set for one process; a step has a number.
const Launcher kSrun{.name = "srun",
                     .names = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
                     .job = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"},
                     .step = "SLURM_STEP_ID",
                     .sizes_by_node = true};
const Launcher kPmi{
    .name = "PMI", .names = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, .tells_local = false};

const std::array<Launcher, 5> kLaunchers{{
    {.name = "torchrun", .names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, .job = kMeeting},
    {.name = "Open MPI",
     .names = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "OMPI_COMM_WORLD_LOCAL_SIZE"},
     .job = {"PMIX_NAMESPACE"}},
    {.name = "MVAPICH",
     .names = {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"}},
    kPmi,
    kSrun,
}};

std::string found(const Variables& variables, const Launcher& launcher) {
  std::vector<std::string> parts;
  for (const char* name : launcher.names) {
    const auto it = variables.find(name);
    parts.push_back(it == variables.end() ? fmt::format("{} unset", name) : fmt::format("{}={}", name, it->second));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

constexpr const char* kRemedy = "start with `fsdp run`, torchrun, mpirun or srun, which set all of them, or unset them";

std::optional<int> parse(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

int to_int(const Variables& variables, const Launcher& launcher, Name name) {
  const std::string& text = variables.at(launcher.names[name]);
  const std::optional<int> value = parse(text);
  if (!value) {
    throw InvalidArgument(fmt::format("launch environment: expected an integer in {}, got \"{}\" (found {}); {}",
                                      launcher.names[name], text, found(variables, launcher), kRemedy));
  }
  return *value;
}

// Slurm writes how many tasks each node has: "2(x3),1" is 2, 2, 2, 1.
int to_tasks_of_node(const Variables& variables, const char* name) {
  const auto node_id = variables.find("SLURM_NODEID");
  int node = node_id == variables.end() ? -1 : parse(node_id->second).value_or(-1);
  std::string_view rest = variables.at(name);
  while (node >= 0 && !rest.empty()) {
    const std::string_view part = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(part.size() + 1, rest.size()));
    const std::size_t open = part.find("(x");
    const std::optional<int> tasks = parse(part.substr(0, open));
    const std::optional<int> nodes = open == std::string_view::npos ? 1
                                     : part.ends_with(')') ? parse(part.substr(open + 2, part.size() - open - 3))
                                                           : std::nullopt;
    if (!tasks || !nodes || *nodes < 1) break;
    if (node < *nodes) return *tasks;
    node -= *nodes;
  }
  throw InvalidArgument(
      fmt::format("launch environment: expected the tasks of each node in {}, as in 2(x3),1, and this node's number in "
                  "SLURM_NODEID, got \"{}\" and {}; {}",
                  name, variables.at(name), node_id == variables.end() ? "unset" : node_id->second, kRemedy));
}

LaunchIdentity identify_explicitly(int rank, int world_size) {
  if (rank < 0 || world_size < 1 || rank >= world_size) {
    throw InvalidArgument(
        fmt::format("InitOptions: expected both rank and world_size with 0 <= rank < world_size, or neither (-1), "
                    "got rank {} and world_size {}",
                    rank, world_size));
  }
  return {rank, world_size, rank, world_size};  // no launcher speaks, so all ranks are here
}

std::string job_of(const Variables& variables, const std::vector<const char*>& names) {
  if (names.empty() || value_or(variables, names.front(), "").empty()) return {};
  std::vector<std::string> values;
  for (const char* name : names) values.push_back(value_or(variables, name, ""));
  return fmt::format("{}", fmt::join(values, "/"));
}

// Nothing where no variable of the launcher is set.
std::optional<LaunchIdentity> identify_by(const Launcher& launcher, const Variables& variables) {
  if (launcher.step != nullptr && variables.count(launcher.step) == 0) return std::nullopt;
  const auto is_set = [&](const char* name) { return variables.count(name) != 0; };
  const auto& names = launcher.names;
  const int needed = launcher.tells_local ? 4 : 2;
  const auto told = std::count_if(names.begin(), names.begin() + needed, is_set);
  if (told == 0 && launcher.step == nullptr) return std::nullopt;
  const bool tells_local = is_set(names[kLocalRank]);
  if (told < needed || tells_local != is_set(names[kLocalRanks])) {
    throw InvalidArgument(fmt::format("launch environment: a part of {}'s variables is set: {}; {}", launcher.name,
                                      found(variables, launcher), kRemedy));
  }
  LaunchIdentity self{.rank = to_int(variables, launcher, kRank),
                      .world_size = to_int(variables, launcher, kRanks),
                      .local_rank = -1,
                      .local_world_size = -1,
                      .launcher = launcher.name,
                      .job = job_of(variables, launcher.job)};
  bool possible = self.rank >= 0 && self.rank < self.world_size;
  if (tells_local) {
    self.local_rank = to_int(variables, launcher, kLocalRank);
    self.local_world_size = launcher.sizes_by_node ? to_tasks_of_node(variables, names[kLocalRanks])
                                                   : to_int(variables, launcher, kLocalRanks);
    possible = possible && self.local_rank >= 0 && self.local_rank < self.local_world_size &&
               self.local_world_size <= self.world_size && self.local_rank <= self.rank;
  }
  if (!possible) {
    throw InvalidArgument(
        fmt::format("launch environment: expected 0 <= rank < ranks, 0 <= local rank < local ranks, local ranks <= "
                    "ranks and local rank <= rank, got {} from {}; {}",
                    found(variables, launcher), launcher.name, kRemedy));
  }
  return self;
}

// FNV-1a: a job's id may hold any characters at any length; a file name may not.
std::string short_hash(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return fmt::format("{:016x}", hash);
}

// srun --mpi=pmi2 gives its tasks PMI's variables; its own say more.
bool is_slurms_own_pmi(const Variables& variables) {
  const auto same = [&](Name name) {
    const auto of_pmi = variables.find(kPmi.names[name]), of_srun = variables.find(kSrun.names[name]);
    return of_pmi != variables.end() && of_srun != variables.end() && of_pmi->second == of_srun->second;
  };
  return variables.count(kSrun.step) != 0 && same(kRank) && same(kRanks);
}

}  // namespace

Variables process_variables() {
  Variables variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (equals != std::string_view::npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

std::string value_or(const Variables& variables, const char* name, const char* fallback) {
  const auto it = variables.find(name);
  return it == variables.end() || it->second.empty() ? fallback : it->second;
}

LaunchIdentity identify(const Variables& variables, int rank, int world_size) {
  if (rank != -1 || world_size != -1) return identify_explicitly(rank, world_size);
  for (const Launcher& launcher : kLaunchers) {
    if (std::string_view(launcher.name) == kPmi.name && is_slurms_own_pmi(variables)) continue;
    if (std::optional<LaunchIdentity> self = identify_by(launcher, variables)) return *std::move(self);
  }
  return {};
}

RendezvousSocket rendezvous_socket(const Variables& variables, const LaunchIdentity& self,
                                   const std::string& init_method, unsigned user) {
  const std::string named = value_or(variables, "FSDP_RENDEZVOUS", "");
  if (!named.empty()) {
    const std::filesystem::path path(named);
    if (!path.is_absolute() || !path.has_filename()) {
      throw InvalidArgument(fmt::format(
          "FSDP_RENDEZVOUS: expected the absolute path of a socket in a folder of mode 700, got \"{}\"", named));
    }
    return {path, false};
  }
  std::string job = self.job.empty() ? job_of(variables, kMeeting) : self.job;
  if (!init_method.empty() && init_method != "env://") job += " " + init_method;
  if (job.empty()) return {};
  const std::filesystem::path folder = value_or(variables, "TMPDIR", "/tmp");
  return {folder / fmt::format("fsdp-{}", user) / (short_hash(fmt::format("{}/{}", self.launcher, job)) + ".sock"),
          true};
}

}  // namespace fsdp
