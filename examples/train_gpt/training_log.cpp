#include "examples/train_gpt/training_log.h"

#include <utility>

namespace gpt {

TrainingLog::TrainingLog(const Options& options, Report& report, Summary& summary, std::function<double(double)> mean)
    : options_(options), report_(report), summary_(summary), mean_(std::move(mean)) {}

void TrainingLog::add(std::int64_t step, const StepFigures& figures) {
  ++steps_;
  loss_ += figures.loss;
  grad_norm_ += figures.grad_norm;
  seconds_ += figures.seconds;
  const auto done = step + 1;
  // The first step of a run stands alone: it is slower than those that follow.
  if (step == summary_.first_step || done % options_.log_every == 0 || done == options_.last_step())
    close_interval(done, figures);
  report_.progress(done, options_.last_step(), figures.seconds);
}

void TrainingLog::close_interval(std::int64_t done, const StepFigures& last) {
  const auto steps = static_cast<double>(std::exchange(steps_, 0));
  const auto tokens = options_.batch * options_.model.context;
  const double seconds = std::exchange(seconds_, 0.0) / steps;
  const double loss = mean_(std::exchange(loss_, 0.0) / steps);
  if (!summary_.loss_first) summary_.loss_first = loss;
  summary_.loss_last = loss;
  summary_.tokens_per_second = static_cast<double>(tokens) / seconds;
  report_.step({.step = done,
                .last_step = options_.last_step(),
                .loss = loss,
                .grad_norm = std::exchange(grad_norm_, 0.0) / steps,
                .lr = learning_rate(options_, done - 1),
                .seconds_per_step = seconds,
                .tokens_per_step = tokens,
                .memory_bytes = last.memory_bytes});
}

}  // namespace gpt
