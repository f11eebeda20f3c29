#include "comm/tcp_endpoint.h"

#include <charconv>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

constexpr std::string_view kTcp = "tcp://", kFile = "file://", kEnvironment = "env://";

std::uint16_t to_port(std::string_view text, std::string_view where) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error == std::errc() && end == text.data() + text.size() && port != 0) return port;
  throw InvalidArgument(fmt::format("{}: expected a port from 1 to 65535, got \"{}\"", where, text));
}

TcpEndpoint parse_tcp(std::string_view method) {
  const std::string where = fmt::format("InitOptions::init_method \"{}\"", method);
  const std::string_view rest = method.substr(kTcp.size());
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos || colon == 0)
    throw InvalidArgument(fmt::format("{}: expected tcp://host:port", where));
  std::string_view host = rest.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find_first_of(":/[]") != std::string_view::npos) {
    throw InvalidArgument(fmt::format("{}: expected tcp://host:port, with [] around an IPv6 address", where));
  }
  return {.host = std::string(host), .port = to_port(rest.substr(colon + 1), where)};
}

TcpEndpoint parse_file(std::string_view method) {
  const std::filesystem::path path(method.substr(kFile.size()));
  if (!path.is_absolute() || !path.has_filename())
    throw InvalidArgument(fmt::format(
        "InitOptions::init_method \"{}\": expected file:///path of a file that all ranks can reach", method));
  return {.file = path};
}

// Below the ports that systems hand out, another one for each job of srun.
std::uint16_t port_of_job(std::string_view job) {
  std::uint32_t hash = 2166136261U;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return static_cast<std::uint16_t>(10'000 + hash % 20'000);
}

}  // namespace

std::string first_host(std::string_view nodes) {
  const auto refuse = [&]() -> std::string {
    throw InvalidArgument(fmt::format(
        "launch environment: expected a list of hosts as in node[003-005],login in SLURM_STEP_NODELIST, got \"{}\"",
        nodes));
  };
  const std::size_t end = nodes.find_first_of("[,");
  const std::string name(nodes.substr(0, end));
  if (name.find_first_of("] ") != std::string::npos) return refuse();
  if (end == std::string_view::npos || nodes[end] == ',') return name.empty() ? refuse() : name;
  const std::string_view range = nodes.substr(end + 1);
  const std::string_view number = range.substr(0, range.find_first_of("-,]"));
  const std::size_t close = range.find(']');
  if (number.empty() || close == std::string_view::npos) return refuse();
  const std::string_view rest = range.substr(close + 1);
  return name + std::string(number) + (rest.empty() || rest[0] == ',' ? "" : first_host(rest));
}

TcpEndpoint tcp_endpoint(const Variables& variables, const LaunchIdentity& self, const std::string& init_method) {
  if (init_method.starts_with(kTcp)) return parse_tcp(init_method);
  if (init_method.starts_with(kFile)) return parse_file(init_method);
  if (!init_method.empty() && init_method != kEnvironment) {
    throw InvalidArgument(fmt::format(
        "InitOptions::init_method: expected env://, tcp://host:port or file:///path, got \"{}\"", init_method));
  }
  const std::string host = value_or(variables, "MASTER_ADDR", ""), port = value_or(variables, "MASTER_PORT", "");
  const std::string own_port = value_or(variables, "FSDP_MASTER_PORT", "");
  if (!host.empty() && !own_port.empty()) return {.host = host, .port = to_port(own_port, "FSDP_MASTER_PORT")};
  if (!host.empty() && !port.empty()) {
    const std::uint16_t number = to_port(port, "MASTER_PORT");
    const bool is_taken = value_or(variables, "TORCHELASTIC_USE_AGENT_STORE", "") == "True" && number < 65'535;
    return {.host = host, .port = static_cast<std::uint16_t>(is_taken ? number + 1 : number)};
  }
  const std::string nodes = value_or(variables, "SLURM_STEP_NODELIST", "");
  if (self.launcher == "srun" && !nodes.empty()) return {.host = first_host(nodes), .port = port_of_job(self.job)};
  throw InvalidArgument(
      fmt::format(
          "rank {} of {}{} does not know where rank 0 is: set MASTER_ADDR to a name or address of rank 0's host and "
          "MASTER_PORT to a port that is free there, or InitOptions::init_method to tcp://host:port or "
          "file:///path",
          self.rank, self.world_size, self.launcher.empty() ? "" : " (from " + self.launcher + ")"),
      self.rank);
}

}  // namespace fsdp
