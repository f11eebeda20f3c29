// Processes that work in blocks on command, so that variants of one program can take turns on the same cores. No torch
// header.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

namespace fsdp {

// Bytes of one process at its peak.
struct RankMemory {
  std::size_t parameters = 0, gradients = 0, optimizer = 0, arena = 0, communication = 0, overflow = 0, activations = 0;
  std::size_t engine() const { return parameters + gradients + optimizer + arena + communication + overflow; }
  std::size_t total() const { return engine() + activations; }
};

// What one process says of one block of steps.
struct Measurement {
  double seconds = 0;
  double loss = 0;  // mean over the block's steps and all ranks
  RankMemory memory;
};

// Runs that many steps. Made in the worker's own process, lives as long as it.
using Block = std::function<Measurement(int steps)>;

class WorkerGroup {
 public:
  // Forks `world_size` processes that find the usual variables of a launcher, and in each of them calls `prepare`. The
  // calling process must not have used LibTorch: its threads do not survive a fork.
  WorkerGroup(int world_size, const std::function<Block()>& prepare);
  // Ends the workers and waits for them.
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // All workers run a block; gives rank 0's measurement with the time of the slowest. Throws std::runtime_error if one
  // has died.
  Measurement run(int steps);

 private:
  struct Worker {
    pid_t pid = -1;
    int commands = -1, answers = -1;  // ends of pipes
  };
  void start(int rank, int world_size, const std::function<Block()>& prepare);

  std::filesystem::path directory_;
  std::vector<Worker> workers_;
};

}  // namespace fsdp
