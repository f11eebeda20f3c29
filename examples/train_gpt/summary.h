// The figures of a run, for programs to read. No torch header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace gpt {

struct Summary {
  int world_size = 1;
  std::int64_t parameters = 0, first_step = 0, last_step = 0;
  std::optional<double> loss_first{}, loss_last{};  // of the first step, and of the last line of the log
  std::optional<double> held_out_before{},
      held_out_after{};       // of a resumed model before its first step; of the model at the end
  double bigram_entropy = 0;  // of the training text, in nats
  double tokens_per_second = 0;
  std::size_t state_bytes = 0,
              plain_state_bytes = 0;  // of one rank: parameters, gradients, optimizer state and what serves them
  std::size_t peak_bytes = 0, plain_bytes = 0;  // with activations; the least that plain LibTorch needs
  std::string sample{};
};

// Written beside and renamed. Throws std::runtime_error naming the file.
void write_summary(const std::filesystem::path& file, const Summary& summary);

}  // namespace gpt
