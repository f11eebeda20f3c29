#include <fsdp/loss_scaler.h>

#include <cmath>

#include <ATen/ops/mul.h>
#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

void require(bool holds, const char* field, double found, const char* expected) {
  if (!holds) throw InvalidArgument(fmt::format("LossScaler: expected {} {}, got {}", field, expected, found));
}

bool is_positive(double value) { return std::isfinite(value) && value > 0; }

}  // namespace

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options), scale_(options.initial_scale) {
  require(is_positive(scale_), "initial_scale", scale_, "above 0");
  require(std::isfinite(options.growth_factor) && options.growth_factor >= 1, "growth_factor", options.growth_factor,
          "at least 1");
  require(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor", options.backoff_factor,
          "in (0, 1)");
  require(options.growth_interval > 0, "growth_interval", static_cast<double>(options.growth_interval), "above 0");
}

at::Tensor LossScaler::scale(const at::Tensor& loss) const { return loss.mul(scale_); }

void LossScaler::restore(double scale, std::int64_t finite_steps) {
  require(is_positive(scale), "scale", scale, "above 0");
  require(finite_steps >= 0, "finite_steps", static_cast<double>(finite_steps), "at least 0");
  scale_ = scale;
  finite_steps_ = finite_steps;
}

void LossScaler::update(bool finite) {
  if (!finite) {
    scale_ *= options_.backoff_factor;
    finite_steps_ = 0;
  } else if (++finite_steps_ == options_.growth_interval) {
    // Not beyond what fp32 holds.
    if (scale_ * options_.growth_factor < 3e38) scale_ *= options_.growth_factor;
    finite_steps_ = 0;
  }
}

}  // namespace fsdp
