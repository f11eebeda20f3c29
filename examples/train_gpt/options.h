// What the command line says, checked. No torch header.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/train_gpt/config.h"

namespace gpt {

// A command line that cannot be meant. what() names the flag and the remedy.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  std::vector<std::filesystem::path> data;  // default: the headers of the LibTorch this was built against
  std::string strategy = "full_shard", precision = "fp32";
  int shard_group = 0;  // 0 = all ranks
  Config model;
  std::int64_t batch = 12;      // rows over all ranks
  std::int64_t steps = 1000;    // length of the schedule
  std::int64_t stop_after = 0;  // end here, in the middle of the schedule; 0 = at its end
  double lr = 1e-3;
  std::int64_t seed = 1;
  std::int64_t log_every = 20;
  std::int64_t save_every = 0;  // 0 = at the end only
  std::filesystem::path out;    // empty = nothing is saved
  bool resume = false;
  bool plain = false;
  std::int64_t sample = 0;  // bytes
  std::filesystem::path consolidate, load, summary;
  int threads = 0;  // 0 = as LibTorch decides
  int prefetch = 1;

  std::int64_t last_step() const { return stop_after > 0 && stop_after < steps ? stop_after : steps; }
};

struct CommandLine {
  Options options;
  std::string help;  // not empty: --help was asked for, and nothing else counts
};

// Throws UsageError. Looks at files only to see that --out and the folders of --consolidate and --summary can be meant.
CommandLine parse_command_line(int argc, const char* const* argv);

// The part that needs the number of ranks. Throws UsageError.
void check_world_size(const Options& options, int world_size);

// Linear warm-up over the first twentieth of the schedule, then a cosine down to a tenth of `lr`.
double learning_rate(const Options& options, std::int64_t step);

inline constexpr std::array<double, 2> kBetas{0.9, 0.95};
inline constexpr double kWeightDecay = 0.1;  // of matrices and embeddings; biases and norms are left alone
inline constexpr double kMaxGradNorm = 1.0;

}  // namespace gpt
