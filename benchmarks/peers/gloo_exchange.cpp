// What LibTorch's own process group makes of the exchanges of `fsdp bench comm`: c10d's Gloo over loopback TCP, its
// all-gather, and the cheaper of its ways to a reduce-scatter, an all-to-all and a sum.
// usage: gloo_exchange RANKS BYTES CALLS
#define USE_C10D_GLOO

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace {

using Clock = std::chrono::steady_clock;

struct Times {
  double all_gather = 0, reduce_scatter = 0;  // seconds of one call
};

template <class Call>
double timed(c10d::ProcessGroupGloo& group, int calls, const Call& call) {
  for (int i = 0; i < 2; ++i) call();
  group.barrier()->wait();
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count() / calls;
  group.barrier()->wait();
  return seconds;
}

Times measure(const std::string& store_path, int rank, int ranks, std::int64_t numel, int calls) {
  at::set_num_threads(1);
  const auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  c10d::ProcessGroupGloo group(c10::make_intrusive<c10d::FileStore>(store_path, ranks), rank, ranks, options);
  at::Tensor whole = at::zeros({numel}), share = at::ones({numel / ranks}), exchanged = at::zeros({numel});
  Times times;
  times.all_gather = timed(group, calls, [&] { group._allgather_base(whole, share)->wait(); });
  std::vector<std::int64_t> even;
  times.reduce_scatter = timed(group, calls, [&] {
    group.alltoall_base(exchanged, whole, even, even)->wait();
    at::sum_out(share, exchanged.view({ranks, numel / ranks}), 0);
  });
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: gloo_exchange RANKS BYTES CALLS\n");
    return 2;
  }
  const int ranks = std::atoi(argv[1]), calls = std::atoi(argv[3]);
  const std::int64_t bytes = std::atoll(argv[2]);
  const std::filesystem::path store = std::filesystem::temp_directory_path() /
                                      ("gloo_exchange." + std::to_string(::getpid()));
  int rank = 0;
  for (int other = 1; other < ranks && rank == 0; ++other) rank = ::fork() == 0 ? other : 0;
  const Times times = measure(store, rank, ranks, bytes / 4, calls);
  if (rank != 0) ::_exit(0);
  const double part = static_cast<double>(ranks - 1) / ranks * static_cast<double>(bytes);
  std::printf(
      "%d ranks, %lld bytes: all_gather %.1f us, busbw %.3f GB/s; all-to-all and sum %.1f us, busbw %.3f GB/s\n", ranks,
      static_cast<long long>(bytes), times.all_gather * 1e6, part / times.all_gather * 1e-9, times.reduce_scatter * 1e6,
      part / times.reduce_scatter * 1e-9);
  while (::wait(nullptr) > 0) {
  }
  std::filesystem::remove(store);
}
