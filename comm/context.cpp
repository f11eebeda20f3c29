#include <fsdp/context.h>

#include <charconv>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include <fsdp/error.h>

#include "comm/backend_choice.h"
#include "comm/launch_environment.h"
#include "comm/pulse.h"
#include "comm/shm_communicator.h"
#include "comm/tcp_communicator.h"
#include "comm/tcp_rendezvous.h"

namespace fsdp {
namespace {

// Whoever starts a job knows its machines better than its program does, so the variable wins.
void take_seconds(const Variables& variables, const char* name, std::chrono::milliseconds& value) {
  const auto variable = variables.find(name);
  if (variable == variables.end()) return;
  double seconds = -1;
  const std::string& text = variable->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds >= 0 && seconds < 1e9))
    throw InvalidArgument(fmt::format("{}: expected seconds, as in 600 or 0.5, got \"{}\"", name, text));
  value = std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

InitOptions resolve(InitOptions options, const Variables& variables) {
  if (options.init_method.empty()) options.init_method = value_or(variables, "FSDP_INIT_METHOD", "");
  take_seconds(variables, "FSDP_TIMEOUT", options.timeout);
  take_seconds(variables, "FSDP_SILENCE", options.silence);
  return options;
}

void check_options(const InitOptions& options, const LaunchIdentity& self) {
  if (options.timeout.count() <= 0) {
    throw InvalidArgument(
        fmt::format("InitOptions::timeout: expected a positive time, got {} ms", options.timeout.count()));
  }
  if (options.silence.count() != 0 && options.silence < kShortestSilence) {
    throw InvalidArgument(fmt::format(
        "InitOptions::silence: expected at least {} ms, as a healthy rank may be late by a beat or two, or 0 "
        "for never, got {} ms",
        kShortestSilence.count(), options.silence.count()));
  }
  if (self.world_size <= kMaxWorldSize) return;
  throw InvalidArgument(fmt::format("expected at most {} ranks, got {}; start fewer, with more threads each",
                                    kMaxWorldSize, self.world_size));
}

// Where a rank writes its last calls down when its group fails: FSDP_CRASH_DIR, else where it runs; "" = nowhere.
std::filesystem::path crash_folder(const Variables& variables) {
  const auto variable = variables.find("FSDP_CRASH_DIR");
  return variable == variables.end() ? std::filesystem::current_path() : std::filesystem::path(variable->second);
}

std::shared_ptr<PeerCommunicator> connect_shm(const InitOptions& options, const Variables& variables,
                                              const LaunchIdentity& self) {
  const RendezvousSocket socket = rendezvous_socket(variables, self, options.init_method, ::geteuid());
  if (self.world_size > 1 && socket.path.empty()) {
    throw InvalidArgument(
        fmt::format(
            "rank {} of {}{} does not know where to meet the others: set FSDP_RENDEZVOUS to the path of a socket "
            "in a folder of mode 700, or MASTER_PORT to a number that no other job of yours has on this host, "
            "or start with `fsdp run`, torchrun or srun",
            self.rank, self.world_size, self.launcher.empty() ? "" : " (from " + self.launcher + ")"),
        self.rank);
  }
  return make_shm_communicator({socket.path, socket.create_directory, self.rank, self.world_size, options.timeout});
}

Context meet(const InitOptions& asked) {
  const Variables variables = process_variables();
  const InitOptions options = resolve(asked, variables);
  const LaunchIdentity self = identify(variables, options.rank, options.world_size);
  check_options(options, self);
  const bool names_a_place = !options.init_method.empty() && options.init_method != "env://";
  const BackendChoice choice = choose_backend(options.backend, variables, self, names_a_place);
  if (choice.backend == "tcp") {
    TcpPlace place = tcp_place(variables, self, options.init_method, options.timeout, options.silence);
    const std::string reason = place.name.empty() ? choice.reason : choice.reason + "; rank 0 at " + place.name;
    TcpGroup group = make_tcp_communicator(std::move(place));
    group.communicator->set_crash_folder(crash_folder(variables));
    return Context(std::move(group.communicator), group.local_rank, group.local_world_size, reason);
  }
  const std::shared_ptr<PeerCommunicator> communicator = connect_shm(options, variables, self);
  communicator->set_crash_folder(crash_folder(variables));
  // They have met on this host, all of them.
  return Context(communicator, self.local_rank == -1 ? self.rank : self.local_rank,
                 self.local_rank == -1 ? self.world_size : self.local_world_size, choice.reason);
}

}  // namespace

Context::Context(std::shared_ptr<Communicator> communicator, int local_rank, int local_world_size,
                 std::string backend_reason)
    : communicator_(std::move(communicator)),
      local_rank_(local_rank),
      local_world_size_(local_world_size),
      backend_reason_(std::move(backend_reason)) {}

double Context::mean(double value) const {
  communicator_->all_reduce(reinterpret_cast<std::byte*>(&value), 1, DType::kFloat64, ReduceOp::kSum);
  return value / world_size();
}

Context init(const InitOptions& asked) {
  try {
    return meet(asked);
  } catch (const std::system_error& error) {
    throw CommunicationError(
        fmt::format("init: {}; check the network of this host and its limits (ulimit -n)", error.what()));
  }
}

}  // namespace fsdp
