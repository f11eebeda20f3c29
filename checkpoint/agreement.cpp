#include "checkpoint/agreement.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

struct Outcome {
  std::uint64_t failed = 0;
  std::uint64_t bytes = 0;  // of the text
};

struct Attempt {
  Outcome outcome;
  std::string text;  // the result, or the reason
};

Attempt attempt(const std::function<std::string()>& work) {
  Attempt made;
  try {
    made.text = work();
  } catch (const std::exception& error) {
    made = {.outcome = {.failed = 1}, .text = error.what()};
  }
  made.outcome.bytes = made.text.size();
  return made;
}

std::vector<Outcome> gather_outcomes(Communicator& communicator, const Outcome& own) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(communicator.world_size()));
  communicator.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(outcomes)));
  return outcomes;
}

std::vector<std::string> gather_texts(Communicator& communicator, const std::vector<Outcome>& outcomes,
                                      std::string text) {
  const std::size_t width = std::max_element(outcomes.begin(), outcomes.end(), [](const Outcome& a, const Outcome& b) {
                              return a.bytes < b.bytes;
                            })->bytes;
  text.resize(width);
  std::string all(width * outcomes.size(), '\0');
  communicator.all_gather(std::as_bytes(std::span(text)), std::as_writable_bytes(std::span(all)));
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    texts.push_back(all.substr(rank * width, outcomes[rank].bytes));
  }
  return texts;
}

}  // namespace

std::vector<std::string> on_all_ranks(Communicator& communicator, std::string_view what,
                                      const std::function<std::string()>& work) {
  Attempt own = attempt(work);
  const std::vector<Outcome> outcomes = gather_outcomes(communicator, own.outcome);
  std::vector<int> failed;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].failed) failed.push_back(static_cast<int>(rank));
  }
  std::vector<std::string> texts = gather_texts(communicator, outcomes, std::move(own.text));
  if (failed.empty()) return texts;
  const int first = failed.front();
  std::string message = fmt::format("{} failed on rank {}: {}", what, first, texts[static_cast<std::size_t>(first)]);
  if (failed.size() > 1) {
    message += fmt::format(" (failed too: rank {})", fmt::join(failed.begin() + 1, failed.end(), ", "));
  }
  throw CheckpointError(message, first);
}

std::string on_rank_zero(Communicator& communicator, std::string_view what, const std::function<std::string()>& work) {
  Attempt made;
  if (communicator.rank() == 0) made = attempt(work);
  communicator.broadcast(std::as_writable_bytes(std::span(&made.outcome, 1)), 0);
  made.text.resize(made.outcome.bytes);
  communicator.broadcast(std::as_writable_bytes(std::span(made.text)), 0);
  if (made.outcome.failed) throw CheckpointError(fmt::format("{} failed on rank 0: {}", what, made.text), 0);
  return std::move(made.text);
}

}  // namespace fsdp
