// Whatever a launcher, a user or an attacker puts into the environment and init_method: understood or refused.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <fsdp/error.h>

#include "comm/backend_choice.h"
#include "comm/job_token.h"
#include "comm/launch_environment.h"
#include "comm/tcp_endpoint.h"

namespace {

template <class Body>
void may_refuse(const Body& body) {
  try {
    body();
  } catch (const fsdp::InvalidArgument&) {
  }
}

}  // namespace

// Lines of NAME=VALUE; the value of INIT_METHOD is that of InitOptions.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  std::string_view text(reinterpret_cast<const char*>(data), bytes);
  fsdp::Variables variables;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const std::size_t equals = line.find('=');
    // A file would be read from this machine.
    if (equals != std::string_view::npos && line.substr(0, equals) != "FSDP_JOB_TOKEN_FILE")
      variables.emplace(line.substr(0, equals), line.substr(equals + 1));
  }
  const auto found = variables.find("INIT_METHOD");
  const std::string init_method = found == variables.end() ? "" : found->second;
  may_refuse([&] {
    const fsdp::LaunchIdentity self = fsdp::identify(variables, -1, -1);
    if (self.rank < 0 || self.rank >= self.world_size) __builtin_trap();
    if (self.local_world_size != -1 && (self.local_rank < 0 || self.local_rank >= self.local_world_size))
      __builtin_trap();
    may_refuse([&] { fsdp::rendezvous_socket(variables, self, init_method, 7); });
    may_refuse([&] { fsdp::choose_backend("auto", variables, self, !init_method.empty()); });
    may_refuse([&] {
      const fsdp::TcpEndpoint endpoint = fsdp::tcp_endpoint(variables, self, init_method);
      if (endpoint.file.empty() == (endpoint.host.empty() || endpoint.port == 0)) __builtin_trap();
    });
  });
  may_refuse([&] { fsdp::job_token(variables); });
  return 0;
}
