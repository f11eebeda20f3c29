#include <fsdp/context.h>

#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include <fsdp/error.h>

#include "comm/launch_environment.h"
#include "comm/shm_communicator.h"

namespace fsdp {
namespace {

void require_known_backend(const std::string& backend) {
  if (backend == "auto" || backend == "shm") return;
  const std::string_view remedy = backend == "thread"
                                      ? "; ranks as threads of one process come from run_ranks in <fsdp/testing.h>"
                                      : "";
  throw InvalidArgument(fmt::format("InitOptions::backend: expected auto or shm, got \"{}\"{}", backend, remedy));
}

void require_one_host(const LaunchIdentity& self) {
  if (self.world_size > kMaxWorldSize) {
    throw InvalidArgument(
        fmt::format("shm backend: expected at most {} ranks, got {}; start fewer, with more threads each",
                    kMaxWorldSize, self.world_size));
  }
  if (self.local_world_size == self.world_size || self.local_world_size == -1) return;
  throw InvalidArgument(
      fmt::format("shm backend: expected all ranks on one host, got {} of {} here (from {}); start all ranks on one "
                  "host, as with torchrun --nnodes 1 or srun --nodes 1",
                  self.local_world_size, self.world_size, self.launcher));
}

}  // namespace

Context::Context(std::shared_ptr<Communicator> communicator, int local_rank, int local_world_size)
    : communicator_(std::move(communicator)), local_rank_(local_rank), local_world_size_(local_world_size) {}

double Context::mean(double value) const {
  communicator_->all_reduce(reinterpret_cast<std::byte*>(&value), 1, DType::kFloat64, ReduceOp::kSum);
  return value / world_size();
}

Context init(const InitOptions& options) {
  const Variables variables = process_variables();
  const auto from_launcher = variables.find("FSDP_BACKEND");  // `fsdp run --backend`
  const bool launcher_decides = options.backend == "auto" && from_launcher != variables.end();
  require_known_backend(launcher_decides ? from_launcher->second : options.backend);
  if (options.timeout.count() <= 0) {
    throw InvalidArgument(
        fmt::format("InitOptions::timeout: expected a positive time, got {} ms", options.timeout.count()));
  }
  const LaunchIdentity self = identify(variables, options.rank, options.world_size);
  require_one_host(self);
  const RendezvousSocket socket = rendezvous_socket(variables, self, ::geteuid());
  if (self.world_size > 1 && socket.path.empty()) {
    throw InvalidArgument(
        fmt::format(
            "rank {} of {}{} does not know where to meet the others: set FSDP_RENDEZVOUS to the path of a socket "
            "in a folder of mode 700, or MASTER_PORT to a number that no other job of yours has on this host, "
            "or start with `fsdp run`, torchrun or srun",
            self.rank, self.world_size, self.launcher.empty() ? "" : " (from " + self.launcher + ")"),
        self.rank);
  }
  const MeetingPlace place{socket.path, socket.create_directory, self.rank, self.world_size, options.timeout};
  std::shared_ptr<Communicator> communicator = make_shm_communicator(place);
  // They have met on this host, all of them.
  if (self.local_rank == -1) return Context(std::move(communicator), self.rank, self.world_size);
  return Context(std::move(communicator), self.local_rank, self.local_world_size);
}

}  // namespace fsdp
