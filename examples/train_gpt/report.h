// What the run says to people, on one rank. No torch header.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpt {

struct StepLine {
  std::int64_t step = 0, last_step = 0;
  double loss = 0, grad_norm = 0, lr = 0, seconds_per_step = 0;
  std::int64_t tokens_per_step = 0;
  std::size_t memory_bytes = 0;
};

// One purpose of memory; a figure that does not exist is left out.
struct MemoryRow {
  std::string kind;
  std::optional<std::size_t> predicted{}, measured{}, plain{};
};

// Silent unless `speaks`. On a terminal a progress line is kept up to date below the log, in colour unless NO_COLOR is set.
class Report {
 public:
  explicit Report(bool speaks);

  void line(const std::string& text);
  void heading(const std::string& text);
  void step(const StepLine& line);
  // After every step; shown on a terminal only.
  void progress(std::int64_t step, std::int64_t last_step, double seconds_per_step);
  void memory(const std::vector<MemoryRow>& rows);
  // Text written by a model may hold any byte: what a terminal would act on is shown as a dot.
  void passage(const std::string& text);

 private:
  void print(const std::string& text);

  bool speaks_, terminal_, colour_;
  bool progress_shown_ = false;
};

std::string format_bytes(std::size_t bytes);  // 17.3 MiB
std::string format_duration(double seconds);  // 1m02s

}  // namespace gpt
