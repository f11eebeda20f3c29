// Turns the steps of a run into lines of the report and figures of the summary. No torch header.
#pragma once

#include <cstdint>
#include <functional>

#include "examples/train_gpt/options.h"
#include "examples/train_gpt/report.h"
#include "examples/train_gpt/summary.h"

namespace gpt {

struct StepFigures {
  double loss = 0;       // of this rank's slice of the batch
  double grad_norm = 0;  // before clipping
  double seconds = 0;
  std::size_t memory_bytes = 0;  // peak so far
};

class TrainingLog {
 public:
  // Borrows all three. `mean` gives every rank the mean of the ranks' values.
  TrainingLog(const Options& options, Report& report, Summary& summary, std::function<double(double)> mean);

  // Of steps counted from 0, one after the other. Every --log-every steps, and at the first and last, ranks take a mean: call it on all of them.
  void add(std::int64_t step, const StepFigures& figures);

 private:
  void close_interval(std::int64_t done, const StepFigures& last);

  const Options& options_;
  Report& report_;
  Summary& summary_;
  std::function<double(double)> mean_;
  std::int64_t steps_ = 0;  // in the interval that is open
  double loss_ = 0, grad_norm_ = 0, seconds_ = 0;
};

}  // namespace gpt
