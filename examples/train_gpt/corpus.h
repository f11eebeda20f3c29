// Text as bytes, cut into a training and a held-out part, and windows drawn from it. Everything depends on (text, seed, step) alone, never on
// the number of ranks or on what was drawn before, so that a run may stop and go on with another number of ranks. No torch header.
#pragma once

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpt {

// Data that cannot be read or is too short. what() names the path and the remedy.
class DataError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `rows` windows of `length` bytes each, row after row.
struct Windows {
  std::int64_t rows = 0, length = 0;
  std::vector<std::uint8_t> bytes{};
};

// One rank's slice of a global batch.
struct BatchRequest {
  std::int64_t seed = 0;
  std::int64_t step = 0;
  std::int64_t global_rows = 0;  // divisible by world_size
  int rank = 0, world_size = 1;
};

class Corpus {
 public:
  // Every twentieth block of the text is held out. Throws DataError where either part is shorter than one window of context + 1 bytes.
  Corpus(const std::string& text, std::int64_t context);
  // Files named here are read whatever they are called; folders are searched for source code and prose (see corpus.cpp). They are
  // joined in the given order, those of a folder sorted. Throws DataError where a path cannot be read or nothing is found.
  static Corpus read(const std::vector<std::filesystem::path>& paths, std::int64_t context);

  std::int64_t train_bytes() const { return static_cast<std::int64_t>(train_.size()); }
  std::int64_t held_out_bytes() const { return static_cast<std::int64_t>(held_out_.size()); }
  std::int64_t files() const { return files_; }

  // Rows [rank * global_rows / world_size, (rank + 1) * global_rows / world_size) of the global batch of this step.
  Windows batch(const BatchRequest& request) const;
  // Window `index` of `count` evenly spaced ones of the held-out part. REQUIRES 0 <= index < count.
  Windows held_out_window(std::int64_t index, std::int64_t count) const;

  // Entropy in nats of a byte of the training part given the one before it: what a table of byte pairs can reach at best.
  double bigram_entropy() const;

 private:
  void append_window(Windows& windows, const std::string& text, std::int64_t offset) const;

  std::int64_t window_;
  std::int64_t files_ = 0;
  std::string train_, held_out_;
};

}  // namespace gpt
