#include "comm/backend_choice.h"

#include <string_view>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

void require_known(const std::string& backend, std::string_view where) {
  if (backend == "auto" || backend == "shm" || backend == "tcp") return;
  const std::string_view remedy = backend == "thread"
                                      ? "; ranks as threads of one process come from run_ranks in <fsdp/testing.h>"
                                      : "";
  throw InvalidArgument(fmt::format("{}: expected auto, shm or tcp, got \"{}\"{}", where, backend, remedy));
}

bool are_on_one_host(const LaunchIdentity& self) {
  return self.local_world_size == self.world_size || self.local_world_size == -1;
}

BackendChoice choose(const LaunchIdentity& self, bool is_met_elsewhere) {
  const std::string from = self.launcher.empty() ? "" : fmt::format(" (from {})", self.launcher);
  if (!are_on_one_host(self)) {
    return {"tcp", fmt::format("ranks are on several hosts: {} of {} on this one{}", self.local_world_size,
                               self.world_size, from)};
  }
  const bool is_told = !self.launcher.empty() && self.local_world_size != -1;
  if (is_met_elsewhere && !is_told) return {"tcp", "InitOptions::init_method names a place that other hosts may reach"};
  if (self.local_world_size == -1)
    return {"shm", fmt::format("the launcher{} does not say that ranks are on other hosts", from)};
  return {"shm", self.world_size == 1 ? fmt::format("one rank{}", from)
                                      : fmt::format("all {} ranks are on this host{}", self.world_size, from)};
}

}  // namespace

BackendChoice choose_backend(const std::string& asked, const Variables& variables, const LaunchIdentity& self,
                             bool is_met_elsewhere) {
  require_known(asked, "InitOptions::backend");
  BackendChoice choice{asked, "InitOptions::backend"};
  if (const auto variable = variables.find("FSDP_BACKEND"); asked == "auto" && variable != variables.end()) {
    require_known(variable->second, "FSDP_BACKEND");
    choice = {variable->second, "FSDP_BACKEND"};
  }
  if (choice.backend == "auto") choice = choose(self, is_met_elsewhere);
  if (choice.backend == "shm" && !are_on_one_host(self)) {
    throw InvalidArgument(fmt::format(
        "shm backend ({}): expected all ranks on one host, got {} of {} here (from {}); start all ranks on one "
        "host, as with torchrun --nnodes 1 or srun --nodes 1, or leave the backend to auto",
        choice.reason, self.local_world_size, self.world_size, self.launcher));
  }
  return choice;
}

}  // namespace fsdp
