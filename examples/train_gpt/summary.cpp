#include "examples/train_gpt/summary.h"

#include <fstream>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace gpt {

namespace {

nlohmann::ordered_json number(const std::optional<double>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace

void write_summary(const std::filesystem::path& file, const Summary& summary) {
  const nlohmann::ordered_json json = {
      {"world_size", summary.world_size},
      {"parameters", summary.parameters},
      {"first_step", summary.first_step},
      {"last_step", summary.last_step},
      {"loss_first", number(summary.loss_first)},
      {"loss_last", number(summary.loss_last)},
      {"held_out_before", number(summary.held_out_before)},
      {"held_out_after", number(summary.held_out_after)},
      {"bigram_entropy", summary.bigram_entropy},
      {"tokens_per_second", summary.tokens_per_second},
      {"state_bytes", summary.state_bytes},
      {"plain_state_bytes", summary.plain_state_bytes},
      {"peak_bytes", summary.peak_bytes},
      {"plain_bytes", summary.plain_bytes},
      {"sample", summary.sample},
  };
  auto temporary = file;
  temporary += ".tmp";
  // A sampled passage may hold bytes that are not UTF-8, which JSON must be.
  std::ofstream stream(temporary);
  stream << json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
  stream.close();
  std::error_code error;
  if (stream) std::filesystem::rename(temporary, file, error);
  if (!stream || error)
    throw std::runtime_error(
        fmt::format("cannot write --summary {}: check that its folder may be written", file.string()));
}

}  // namespace gpt
