#include "comm/launch_environment.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

constexpr std::array kTorchrun{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};

std::string found(const Variables& variables) {
  std::vector<std::string> parts;
  for (const char* name : kTorchrun) {
    const auto it = variables.find(name);
    parts.push_back(it == variables.end() ? fmt::format("{} unset", name) : fmt::format("{}={}", name, it->second));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

int to_int(const Variables& variables, const char* name) {
  const std::string& text = variables.at(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw InvalidArgument(
        fmt::format("launch environment: expected an integer in {}, got \"{}\" (found {}); unset it, or start with "
                    "`fsdp run` or torchrun",
                    name, text, found(variables)));
  }
  return value;
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

LaunchIdentity identify_by_torchrun(const Variables& variables) {
  const LaunchIdentity self{to_int(variables, "RANK"), to_int(variables, "WORLD_SIZE"), to_int(variables, "LOCAL_RANK"),
                            to_int(variables, "LOCAL_WORLD_SIZE")};
  const bool possible = self.rank >= 0 && self.rank < self.world_size && self.local_rank >= 0 &&
                        self.local_rank < self.local_world_size && self.local_world_size <= self.world_size &&
                        self.local_rank <= self.rank;
  if (!possible) {
    throw InvalidArgument(
        fmt::format("launch environment: expected 0 <= RANK < WORLD_SIZE, 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE, "
                    "LOCAL_WORLD_SIZE <= WORLD_SIZE and LOCAL_RANK <= RANK, got {}; start with `fsdp run` or torchrun",
                    found(variables)));
  }
  return self;
}

// FNV-1a: a job's id may hold any characters at any length; a file name may not.
std::string short_hash(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return fmt::format("{:016x}", hash);
}

std::string value_or(const Variables& variables, const char* name, const char* fallback) {
  const auto it = variables.find(name);
  return it == variables.end() || it->second.empty() ? fallback : it->second;
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

LaunchIdentity identify(const Variables& variables, int rank, int world_size) {
  if (rank != -1 || world_size != -1) return identify_explicitly(rank, world_size);
  std::size_t set = 0;
  for (const char* name : kTorchrun) set += variables.count(name);
  if (set == 0) return {};
  if (set < kTorchrun.size()) {
    throw InvalidArgument(
        fmt::format("launch environment: a part of torchrun's variables is set: {}; set all four or none, or start "
                    "with `fsdp run` or torchrun",
                    found(variables)));
  }
  return identify_by_torchrun(variables);
}

RendezvousSocket rendezvous_socket(const Variables& variables, unsigned user) {
  const std::string named = value_or(variables, "FSDP_RENDEZVOUS", "");
  if (!named.empty()) {
    const std::filesystem::path path(named);
    if (!path.is_absolute() || !path.has_filename()) {
      throw InvalidArgument(fmt::format(
          "FSDP_RENDEZVOUS: expected the absolute path of a socket in a folder of mode 700, got \"{}\"", named));
    }
    return {path, false};
  }
  const std::string port = value_or(variables, "MASTER_PORT", "");
  if (port.empty()) return {};
  const std::string job = fmt::format("{}/{}/{}/{}", value_or(variables, "MASTER_ADDR", ""), port,
                                      value_or(variables, "TORCHELASTIC_RUN_ID", ""),
                                      value_or(variables, "TORCHELASTIC_RESTART_COUNT", "0"));
  const std::filesystem::path folder = value_or(variables, "TMPDIR", "/tmp");
  return {folder / fmt::format("fsdp-{}", user) / (short_hash(job) + ".sock"), true};
}

}  // namespace fsdp
