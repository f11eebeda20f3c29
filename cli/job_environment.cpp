#include "cli/job_environment.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <thread>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "cli/system_call.h"

namespace fsdp {

namespace {

constexpr const char* kSocketName = "rendezvous";

// libfsdp's ranks meet at the socket in the job's directory; the port is for programs that open a TCP store of their own.
int free_port() {
  const UniqueFd socket(check_call(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket for MASTER_PORT"));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  check_call(::bind(socket.get(), generic, length), "bind for MASTER_PORT");
  check_call(::getsockname(socket.get(), generic, &length), "getsockname for MASTER_PORT");
  return ntohs(address.sin_port);
}

std::filesystem::path make_private_directory() {
  const char* variable = std::getenv("TMPDIR");
  const std::string parent = variable && *variable ? variable : "/tmp";
  std::string pattern = std::filesystem::absolute(parent) / "fsdp-XXXXXX";
  constexpr auto kLimit = sizeof(sockaddr_un::sun_path);
  if (pattern.size() + 1 + ::strlen(kSocketName) >= kLimit) {
    throw InvalidArgument(fmt::format(
        "TMPDIR='{}' is too long for a socket's path (limit {} bytes); set TMPDIR to a shorter one", parent, kLimit));
  }
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw InvalidArgument(fmt::format("cannot make a directory in '{}': {}; set TMPDIR to one that is writable", parent,
                                      ::strerror(errno)));
  }
  return pattern;
}

}  // namespace

std::map<std::string, std::string> JobEnvironment::variables(int rank, bool omp_num_threads_set) const {
  const auto index = std::to_string(rank);
  const auto size = std::to_string(world_size);
  std::map<std::string, std::string> result{
      {"RANK", index},
      {"WORLD_SIZE", size},
      {"LOCAL_RANK", index},
      {"LOCAL_WORLD_SIZE", size},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(master_port)},
      {"TORCHELASTIC_RUN_ID", job_id},
      {"FSDP_JOB_TOKEN", token},
      {"FSDP_RENDEZVOUS", directory / kSocketName},
  };
  if (!backend.empty()) result["FSDP_BACKEND"] = backend;
  if (!omp_num_threads_set) result["OMP_NUM_THREADS"] = std::to_string(threads_per_rank);
  return result;
}

JobEnvironment make_job_environment(int world_size, const std::string& backend) {
  std::random_device random;  // the system's: fit for secrets
  std::string token;
  for (int i = 0; i < 8; ++i) token += fmt::format("{:08x}", random());
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  return {.world_size = world_size,
          .threads_per_rank = std::max(1, cores / world_size),
          .master_port = free_port(),
          .job_id = fmt::format("fsdp-{}-{:08x}", ::getpid(), random()),
          .token = token,
          .backend = backend,
          .directory = make_private_directory()};
}

}  // namespace fsdp
