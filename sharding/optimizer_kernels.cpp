#include "sharding/optimizer_kernels.h"

#include <array>
#include <cmath>
#include <type_traits>

#include "memory/half.h"
#include "memory/vector_dispatch.h"

namespace fsdp {
namespace {

template <class State>
struct AdamWScalars {
  State decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_sqrt_correction2, eps, gradient_scale;
  explicit AdamWScalars(const AdamWUpdate& u)
      : decay(static_cast<State>(1 - u.lr * u.weight_decay)),
        beta1(static_cast<State>(u.beta1)),
        one_minus_beta1(static_cast<State>(1 - u.beta1)),
        beta2(static_cast<State>(u.beta2)),
        one_minus_beta2(static_cast<State>(1 - u.beta2)),
        step_size(static_cast<State>(u.lr / (1 - std::pow(u.beta1, static_cast<double>(u.step))))),
        inverse_sqrt_correction2(static_cast<State>(1 / std::sqrt(1 - std::pow(u.beta2, static_cast<double>(u.step))))),
        eps(static_cast<State>(u.eps)),
        gradient_scale(static_cast<State>(u.gradient_scale)) {}
};

template <class Parameter, class State>
[[gnu::always_inline]] inline void adamw_loop(const OptimizerSpan& span, const AdamWScalars<State>& s) {
  auto* __restrict parameter = reinterpret_cast<Parameter*>(span.parameter);
  const auto* __restrict gradient = reinterpret_cast<const State*>(span.gradient);
  auto* __restrict first = reinterpret_cast<State*>(span.first);
  auto* __restrict second = reinterpret_cast<State*>(span.second);
  for (std::int64_t i = 0; i < span.numel; ++i) {
    const State g = gradient[i] * s.gradient_scale;
    const State m = s.beta1 * first[i] + s.one_minus_beta1 * g;
    const State v = s.beta2 * second[i] + s.one_minus_beta2 * (g * g);
    first[i] = m;
    second[i] = v;
    const State denominator = std::sqrt(v) * s.inverse_sqrt_correction2 + s.eps;
    parameter[i] = narrow<Parameter>(static_cast<State>(widen(parameter[i])) * s.decay -
                                     s.step_size * (m / denominator));
  }
}

FSDP_VECTOR_DISPATCH void adamw_f32(const OptimizerSpan& span, const AdamWScalars<float>& s) {
  adamw_loop<float, float>(span, s);
}
FSDP_VECTOR_DISPATCH void adamw_f64(const OptimizerSpan& span, const AdamWScalars<double>& s) {
  adamw_loop<double, double>(span, s);
}
FSDP_VECTOR_DISPATCH void adamw_bf16(const OptimizerSpan& span, const AdamWScalars<float>& s) {
  adamw_loop<BFloat16, float>(span, s);
}
void adamw_f16(const OptimizerSpan& span, const AdamWScalars<float>& s) { adamw_loop<Half, float>(span, s); }

template <class State>
struct SgdScalars {
  State lr, momentum, weight_decay, gradient_scale;
  bool has_momentum, nesterov, first_step;
  explicit SgdScalars(const SgdUpdate& u)
      : lr(static_cast<State>(u.lr)),
        momentum(static_cast<State>(u.momentum)),
        weight_decay(static_cast<State>(u.weight_decay)),
        gradient_scale(static_cast<State>(u.gradient_scale)),
        has_momentum(u.momentum != 0),
        nesterov(u.nesterov),
        first_step(u.step == 1) {}
};

template <class Parameter, class State>
[[gnu::always_inline]] inline void sgd_loop(const OptimizerSpan& span, const SgdScalars<State>& s) {
  auto* __restrict parameter = reinterpret_cast<Parameter*>(span.parameter);
  const auto* __restrict gradient = reinterpret_cast<const State*>(span.gradient);
  auto* __restrict first = reinterpret_cast<State*>(span.first);
  for (std::int64_t i = 0; i < span.numel; ++i) {
    const State p = static_cast<State>(widen(parameter[i]));
    State g = gradient[i] * s.gradient_scale + s.weight_decay * p;
    if (s.has_momentum) {
      const State buffer = s.first_step ? g : s.momentum * first[i] + g;
      first[i] = buffer;
      g = s.nesterov ? g + s.momentum * buffer : buffer;
    }
    parameter[i] = narrow<Parameter>(p - s.lr * g);
  }
}

FSDP_VECTOR_DISPATCH void sgd_f32(const OptimizerSpan& span, const SgdScalars<float>& s) {
  sgd_loop<float, float>(span, s);
}
FSDP_VECTOR_DISPATCH void sgd_f64(const OptimizerSpan& span, const SgdScalars<double>& s) {
  sgd_loop<double, double>(span, s);
}
FSDP_VECTOR_DISPATCH void sgd_bf16(const OptimizerSpan& span, const SgdScalars<float>& s) {
  sgd_loop<BFloat16, float>(span, s);
}
void sgd_f16(const OptimizerSpan& span, const SgdScalars<float>& s) { sgd_loop<Half, float>(span, s); }

// Eight running sums, so that the order is fixed and the loop still fills a vector.
template <class Element>
[[gnu::always_inline]] inline double sum_of_squares_loop(const std::byte* bytes, std::int64_t numel) {
  constexpr std::int64_t kLanes = 8;
  const auto* data = reinterpret_cast<const Element*>(bytes);
  std::array<double, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<double>(data[i + lane]);
      sums[static_cast<std::size_t>(lane)] += value * value;
    }
  }
  for (; i < numel; ++i)
    sums[static_cast<std::size_t>(i % kLanes)] += static_cast<double>(data[i]) * static_cast<double>(data[i]);
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

FSDP_VECTOR_DISPATCH double sum_of_squares_f32(const std::byte* data, std::int64_t numel) {
  return sum_of_squares_loop<float>(data, numel);
}
FSDP_VECTOR_DISPATCH double sum_of_squares_f64(const std::byte* data, std::int64_t numel) {
  return sum_of_squares_loop<double>(data, numel);
}

}  // namespace

void adamw_update(const OptimizerSpan& span, const AdamWUpdate& update) {
  switch (span.dtype) {
    case DType::kFloat64: return adamw_f64(span, AdamWScalars<double>(update));
    case DType::kBFloat16: return adamw_bf16(span, AdamWScalars<float>(update));
    case DType::kFloat16: return adamw_f16(span, AdamWScalars<float>(update));
    default: return adamw_f32(span, AdamWScalars<float>(update));
  }
}

void sgd_update(const OptimizerSpan& span, const SgdUpdate& update) {
  switch (span.dtype) {
    case DType::kFloat64: return sgd_f64(span, SgdScalars<double>(update));
    case DType::kBFloat16: return sgd_bf16(span, SgdScalars<float>(update));
    case DType::kFloat16: return sgd_f16(span, SgdScalars<float>(update));
    default: return sgd_f32(span, SgdScalars<float>(update));
  }
}

double sum_of_squares(const std::byte* data, std::int64_t numel, DType dtype) {
  return dtype == DType::kFloat64 ? sum_of_squares_f64(data, numel) : sum_of_squares_f32(data, numel);
}

}  // namespace fsdp
