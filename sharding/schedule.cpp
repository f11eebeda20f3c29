#include <fsdp/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

void require(bool holds, const char* text, double found) {
  if (!holds) throw InvalidArgument(fmt::format("schedule: expected {}, got {}", text, found));
}

// `fall` maps [0, 1] to [1, 0].
template <class Fall>
Schedule warmup_then(std::int64_t warmup_steps, std::int64_t total_steps, double final_factor, Fall fall) {
  require(warmup_steps >= 0, "warmup_steps of at least 0", static_cast<double>(warmup_steps));
  require(total_steps > warmup_steps, "total_steps above warmup_steps", static_cast<double>(total_steps));
  require(final_factor >= 0, "final_factor of at least 0", final_factor);
  return [=](std::int64_t step) {
    if (step < warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
    const double progress = static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps);
    return final_factor + (1 - final_factor) * fall(std::min(progress, 1.0));
  };
}

}  // namespace

Schedule warmup_cosine(std::int64_t warmup_steps, std::int64_t total_steps, double final_factor) {
  return warmup_then(warmup_steps, total_steps, final_factor,
                     [](double progress) { return 0.5 * (1 + std::cos(std::numbers::pi * progress)); });
}

Schedule warmup_linear(std::int64_t warmup_steps, std::int64_t total_steps, double final_factor) {
  return warmup_then(warmup_steps, total_steps, final_factor, [](double progress) { return 1 - progress; });
}

Schedule step_decay(std::int64_t every, double factor) {
  require(every > 0, "`every` above 0", static_cast<double>(every));
  require(factor >= 0, "a factor of at least 0", factor);
  return [=](std::int64_t step) { return std::pow(factor, static_cast<double>(step / every)); };
}

}  // namespace fsdp
