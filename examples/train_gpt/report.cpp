#include "examples/train_gpt/report.h"

#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

namespace gpt {

namespace {

constexpr int kBarCells = 24;

std::string optional_bytes(const std::optional<std::size_t>& bytes) { return bytes ? format_bytes(*bytes) : "-"; }

int percent(std::int64_t step, std::int64_t last_step) { return static_cast<int>(step * 100 / last_step); }

}  // namespace

std::string format_bytes(std::size_t bytes) {
  constexpr std::array<std::string_view, 4> kUnits = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1000 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string format_duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole >= 3600) return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
  if (whole >= 60) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}s", whole);
}

Report::Report(bool speaks)
    : speaks_(speaks),
      terminal_(isatty(STDOUT_FILENO) != 0),
      colour_(terminal_ && std::getenv("NO_COLOR") == nullptr) {}

void Report::print(const std::string& text) {
  if (!speaks_) return;
  if (progress_shown_) fmt::print("\r\x1b[K");
  progress_shown_ = false;
  fmt::print("{}\n", text);
  // A launcher reads through a pipe; without this, lines would come in heaps.
  std::fflush(stdout);
}

void Report::line(const std::string& text) { print(text); }

void Report::heading(const std::string& text) {
  print(colour_ ? fmt::format("\n\x1b[1m{}\x1b[0m", text) : "\n" + text);
}

void Report::step(const StepLine& line) {
  const double tokens_per_second = static_cast<double>(line.tokens_per_step) / line.seconds_per_step;
  print(fmt::format(
      "step {:>5}/{} {:>3}%  loss {:.4f}  gnorm {:.3f}  lr {:.1e}  {:.1f}k tok/s  {:.0f} ms  mem {}  eta {}", line.step,
      line.last_step, percent(line.step, line.last_step), line.loss, line.grad_norm, line.lr, tokens_per_second / 1000,
      line.seconds_per_step * 1000, format_bytes(line.memory_bytes),
      format_duration(static_cast<double>(line.last_step - line.step) * line.seconds_per_step)));
}

void Report::progress(std::int64_t step, std::int64_t last_step, double seconds_per_step) {
  if (!speaks_ || !terminal_) return;
  const auto filled = static_cast<std::size_t>(step * kBarCells / last_step);
  fmt::print("\r\x1b[K[{}{}] {:>3}%  step {}/{}  eta {}", std::string(filled, '='),
             std::string(kBarCells - filled, ' '), percent(step, last_step), step, last_step,
             format_duration(static_cast<double>(last_step - step) * seconds_per_step));
  std::fflush(stdout);
  progress_shown_ = true;
}

void Report::memory(const std::vector<MemoryRow>& rows) {
  heading(fmt::format("{:<28}{:>12}{:>12}{:>16}", "memory per rank, peak", "predicted", "measured", "plain, at least"));
  for (const auto& row : rows) {
    print(fmt::format("  {:<26}{:>12}{:>12}{:>16}", row.kind, optional_bytes(row.predicted),
                      optional_bytes(row.measured), optional_bytes(row.plain)));
  }
}

void Report::passage(const std::string& text) {
  std::string shown = "  | ";
  for (const char c : text) {
    if (c == '\n') {
      shown += "\n  | ";
    } else {
      shown += (c >= ' ' && c <= '~') || c == '\t' ? c : '.';
    }
  }
  heading("a passage written by the model");
  print(shown);
}

}  // namespace gpt
