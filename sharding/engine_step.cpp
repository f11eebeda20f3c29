// From the gradients of a step to the next step: what ranks settle and meet on, the update, and what becomes of a step
// that fails.
#include <algorithm>
#include <cmath>

#include <ATen/ops/mul.h>
#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/engine_state.h"

namespace fsdp {
namespace {

void validate(const StepOptions& options) {
  const auto require = [](bool holds, std::string_view field, double found) {
    if (!holds) throw InvalidArgument(fmt::format("Optimizer::step: expected {} above 0, got {}", field, found));
  };
  if (options.max_grad_norm) require(*options.max_grad_norm > 0, "max_grad_norm", *options.max_grad_norm);
  if (options.max_grad_value) require(*options.max_grad_value > 0, "max_grad_value", *options.max_grad_value);
  require(options.norm_type > 0, "norm_type", options.norm_type);
  if (options.max_grad_norm && options.max_grad_value) {
    throw InvalidArgument(
        fmt::format("Optimizer::step: max_grad_norm {} together with max_grad_value {}; clip by the norm or by value",
                    *options.max_grad_norm, *options.max_grad_value));
  }
}

}  // namespace

GradientReducer::Usage EngineState::usage_here() const {
  GradientReducer::Usage usage{std::vector<bool>(gradients_.size()), std::vector<bool>(gradients_.size())};
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const ShardedParameter& p = core_.model.parameters[i];
    usage.used[i] = gradients_[i].taken && !gradients_[i].cleared &&
                    (shows_gradients_ || p.is_placeholder(p.tensor.grad()));
    usage.cleared[i] = gradients_[i].taken && !usage.used[i];
  }
  return usage;
}

void EngineState::settle(std::unique_lock<std::mutex>& lock, std::string_view operation, const StepTerms& terms) {
  drop_if_failed([&] { reducer_.settle(lock, operation, usage_here(), terms); });
}

void EngineState::meet(std::string_view operation) {
  std::unique_lock lock(core_.mutex);
  drop_if_failed([&] { reducer_.meet(lock, operation, usage_here()); });
}

void EngineState::drop_if_failed(const std::function<void()>& body) {
  try {
    body();
  } catch (const StepFailed&) {
    core_.timeline.abandon_step();
    drop_gradients();
    identity_checked_ = false;
    throw;
  }
}

void EngineState::attempt(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommunicationError&) {
    throw;
  } catch (const StepFailed&) {
    throw;
  } catch (const std::exception& error) {
    fail_step(error.what());
  } catch (...) {
    fail_step("an exception that is no std::exception");
  }
}

// The settlement that the other ranks are in, or come to next, is told.
void EngineState::fail_step(const std::string& reason) {
  guarded("Engine::attempt", [&] {
    std::unique_lock lock(core_.mutex);
    reducer_.fail(reason);
    try {
      settle(lock, "Engine::attempt");
    } catch (const InvalidArgument& error) {
      // Another rank is in a collective that knows nothing of steps, so from here on ranks would be one apart.
      core_.communicator().abort(fmt::format(
          "Engine::attempt: rank {} failed ({}) while another was in a collective call that cannot be taken "
          "back: {}",
          context().rank(), reason, error.what()));
      throw;
    }
  });
  throw std::logic_error("a settlement with a failure did not throw");
}

at::Tensor EngineState::cast_input(const at::Tensor& input) const {
  const c10::ScalarType param = options_.precision.param;
  const bool casts = param != c10::ScalarType::Float && input.defined() && input.is_floating_point();
  return casts ? input.to(param) : input;
}

std::vector<at::Tensor> EngineState::cast_outputs(std::vector<at::Tensor> outputs) {
  if (!options_.precision.output) return outputs;
  for (at::Tensor& output : outputs) {
    if (output.defined() && output.is_floating_point()) output = output.to(*options_.precision.output);
  }
  const std::lock_guard lock(core_.mutex);
  output_cast_ = true;
  return outputs;
}

at::Tensor EngineState::weigh(const at::Tensor& mean_loss, double samples) {
  if (!(samples >= 0 && std::isfinite(samples)))
    throw InvalidArgument(fmt::format("Engine::weigh: expected samples of at least 0, got {}", samples));
  if (!mean_loss.requires_grad()) return mean_loss.mul(samples);  // of an evaluation
  refuse_update_in_backward("Engine::weigh", "the samples of a step are known only when it is over");
  std::unique_lock lock(core_.mutex);
  if (core_.ordered_sums) reducer_.begin_micro_batch(lock);
  samples_.samples.add(samples);
  samples_.weighed = true;
  return mean_loss.mul(samples);
}

void EngineState::refuse_update_in_backward(std::string_view operation, std::string_view reason) const {
  if (!core_.update_in_backward) return;
  throw InvalidArgument(
      fmt::format("{} with ShardOptions::update_in_backward: {}; leave one of them out", operation, reason));
}

void EngineState::refuse_half_updated(std::string_view operation) {
  if (!core_.update_in_backward) return;
  const std::lock_guard lock(core_.mutex);
  for (int unit = 0; unit < static_cast<int>(core_.model.units.size()); ++unit) {
    if (!reducer_.is_closed(unit)) continue;
    throw InvalidArgument(
        fmt::format("{} after a backward that has updated weights (update_in_backward), unit {} among them; call "
                    "Optimizer::step first",
                    operation, core_.unit_name(unit)));
  }
}

void EngineState::refuse_with_update_in_backward(const StepOptions& options) const {
  if (!core_.update_in_backward) return;
  const auto refuse = [&](bool asked_for, std::string_view option) {
    if (asked_for)
      refuse_update_in_backward(fmt::format("StepOptions::{}", option), "the step's gradients are applied by now");
  };
  refuse(options.max_grad_norm.has_value(), "max_grad_norm");
  refuse(options.max_grad_value.has_value(), "max_grad_value");
  refuse(options.scaler != nullptr, "scaler");
  refuse(options.norm_type != 2, "norm_type other than 2");
  refuse(options.on_non_finite != OnNonFinite::kFail, "on_non_finite other than kFail");
}

// NOTE [Update in backward]. On the engine's thread.
void EngineState::update_unit(int unit, bool all_used) {
  const std::vector<int>& trainable = core_.unit(unit).trainable;
  for (const int index : trainable) {
    const auto i = static_cast<std::size_t>(index);
    updated_[i] = all_used || reducer_.used()[i];
  }
  optimizer_->step(trainable, updated_, settings(), average_.get());
}

StepSettings EngineState::settings() const { return {.lr_factor = schedule_ ? schedule_(core_.step) : 1.0}; }

StepTerms EngineState::terms_of(const StepOptions& options) const {
  return {.lr = optimizer_->lr() * settings().lr_factor,
          .max_grad_norm = options.max_grad_norm.value_or(0),
          .max_grad_value = options.max_grad_value.value_or(0),
          .norm_type = options.norm_type,
          .on_non_finite = static_cast<double>(options.on_non_finite),
          .loss_scale = options.scaler != nullptr ? options.scaler->scale() : 0,
          .ema_decay = average_ != nullptr ? average_->decay() : 0};
}

// In the step's end: what backward has not updated yet.
void EngineState::update(const StepSettings& step_settings) {
  std::vector<int> parameters;
  for (const UnitLayout& unit : core_.model.units) {
    const auto index = static_cast<int>(&unit - core_.model.units.data());
    if (core_.update_in_backward && reducer_.is_closed(index)) continue;
    parameters.insert(parameters.end(), unit.trainable.begin(), unit.trainable.end());
  }
  optimizer_->step(parameters, reducer_.used(), step_settings, average_.get());
}

void EngineState::set_lr(double lr) {
  refuse_half_updated("Optimizer::set_lr");
  optimizer().set_lr(lr);
}

void EngineState::set_schedule(Schedule schedule) {
  refuse_half_updated("Optimizer::set_schedule");
  schedule_ = std::move(schedule);
}

StepResult EngineState::step(const StepOptions& options) {
  validate(options);
  refuse_with_update_in_backward(options);
  optimizer();
  refuse_within_scopes("Optimizer::step");
  core_.model.check_identity();
  const bool used = std::any_of(gradients_.begin(), gradients_.end(), [](const GradientSlot& g) { return g.taken; });
  if (options_.precision.output && used && !output_cast_) {
    throw InvalidArgument(
        fmt::format("Optimizer::step: precision.output is {}, but no forward since the last step went through "
                    "Engine::forward, which casts to it; call the model by it, or leave precision.output out",
                    c10::toString(*options_.precision.output)));
  }
  return guarded("Optimizer::step", [&] {
    std::unique_lock lock(core_.mutex);
    pager_.free_all(lock);
    settle(lock, "Optimizer::step", terms_of(options));
    reducer_.check_agreement();
    lock.unlock();
    samples_.unweighed = !samples_.weighed && used;
    const GradientSummary summary = summarize_gradients(core_, reducer_.used(), reducer_.squares(), options.norm_type,
                                                        samples_);
    const double scale = summary.weight / (options.scaler != nullptr ? options.scaler->scale() : 1.0);
    StepResult result{.grad_norm = summary.norm * scale};
    if (summary.first_bad >= 0) {
      refuse_non_finite(options, summary.first_bad, result);
    } else {
      // As torch::nn::utils::clip_grad_norm_: never above 1, and a zero norm divides by nothing.
      const double clip = options.max_grad_norm ? std::min(1.0, *options.max_grad_norm / (result.grad_norm + 1e-6))
                                                : 1.0;
      StepSettings step_settings = settings();
      step_settings.gradient = {clip * scale, options.max_grad_value.value_or(GradientUse{}.limit)};
      update(step_settings);
    }
    if (options.scaler != nullptr) options.scaler->update(/*finite=*/summary.first_bad < 0);
    lock.lock();
    end_step(/*updated=*/!result.skipped);
    lock.unlock();
    core_.communicator().barrier();  // no rank gathers before all have stepped
    return result;
  });
}

// Fills in what becomes of a step whose gradients are not finite, or throws; the same on every rank.
void EngineState::refuse_non_finite(const StepOptions& options, int first_bad, StepResult& result) const {
  result.first_bad_parameter = core_.model.parameters[static_cast<std::size_t>(first_bad)].name;
  result.skipped = true;
  // A scale above 1 may be what made them overflow; once it is not, they are bad by themselves.
  if (options.scaler != nullptr && options.scaler->scale() > 1) return;
  result.stop = options.on_non_finite == OnNonFinite::kStop;
  if (options.on_non_finite != OnNonFinite::kFail) return;
  const std::string_view remedy =
      core_.update_in_backward
          ? "with update_in_backward the weights were updated with it: resume from the newest checkpoint"
          : "nothing was updated; lower the learning rate, look at this step's batch, or skip such steps with "
            "StepOptions{.on_non_finite = OnNonFinite::kSkip}";
  throw Error(ErrorId::kNonFinite, fmt::format("step {}: the gradient of parameter {} is not finite on some rank; {}",
                                               core_.step.load(), result.first_bad_parameter, remedy));
}

void EngineState::zero_grad() {
  refuse_half_updated("Optimizer::zero_grad");
  guarded("Optimizer::zero_grad", [&] {
    std::unique_lock lock(core_.mutex);
    settle(lock, "Optimizer::zero_grad");
    drop_gradients();
  });
}

void EngineState::end_step(bool updated) {
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    // A graph kept over the step saved the old values; its backward must throw, as after torch::optim's in-place
    // update.
    if (updated && reducer_.used()[i]) bump_version(core_.model.parameters[i].tensor);
  }
  drop_gradients();
  core_.timeline.finish_step();
  identity_checked_ = false;
  if (updated) ++core_.step;
  report_progress();
}

void EngineState::drop_gradients() {
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].taken) core_.model.parameters[i].tensor.mutable_grad().reset();
    gradients_[i] = {};
  }
  samples_ = {};
  output_cast_ = false;
  reducer_.forget();
}

}  // namespace fsdp
