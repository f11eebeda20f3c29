#include "sharding/optimizer_kernels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <type_traits>

#include "memory/half.h"
#include "memory/vector_dispatch.h"

namespace fsdp {
namespace {

struct Nothing {};  // in place of the rounded copy's type where there is none

template <class State>
struct GradientScalars {
  State scale, limit;
  explicit GradientScalars(const GradientUse& use)
      : scale(static_cast<State>(use.scale)), limit(static_cast<State>(use.limit)) {}
  [[gnu::always_inline]] State operator()(State gradient) const {
    return std::min(std::max(gradient * scale, -limit), limit);
  }
};

template <class State>
struct AdamScalars {
  State decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_sqrt_correction2, eps;
  GradientScalars<State> gradient;
  bool decoupled;
  explicit AdamScalars(const AdamUpdate& u)
      : decay(static_cast<State>(1 - u.lr * u.weight_decay)),
        l2(static_cast<State>(u.weight_decay)),
        beta1(static_cast<State>(u.beta1)),
        one_minus_beta1(static_cast<State>(1 - u.beta1)),
        beta2(static_cast<State>(u.beta2)),
        one_minus_beta2(static_cast<State>(1 - u.beta2)),
        step_size(static_cast<State>(u.lr / (1 - std::pow(u.beta1, static_cast<double>(u.step))))),
        inverse_sqrt_correction2(static_cast<State>(1 / std::sqrt(1 - std::pow(u.beta2, static_cast<double>(u.step))))),
        eps(static_cast<State>(u.eps)),
        gradient(u.gradient),
        decoupled(u.decoupled) {}
};

template <class Parameter, class State, class Rounded, bool decoupled>
[[gnu::always_inline]] inline void adam_loop(const OptimizerSpan& span, const AdamScalars<State>& s) {
  auto* __restrict parameter = reinterpret_cast<Parameter*>(span.parameter);
  const auto* __restrict gradient = reinterpret_cast<const State*>(span.gradient);
  auto* __restrict first = reinterpret_cast<State*>(span.first);
  auto* __restrict second = reinterpret_cast<State*>(span.second);
  [[maybe_unused]] auto* __restrict rounded = reinterpret_cast<Rounded*>(span.rounded);
  for (std::int64_t i = 0; i < span.numel; ++i) {
    State p = static_cast<State>(widen(parameter[i]));
    State g = s.gradient(gradient[i]);
    if constexpr (decoupled) {
      p *= s.decay;
    } else {
      g += s.l2 * p;
    }
    const State m = s.beta1 * first[i] + s.one_minus_beta1 * g;
    const State v = s.beta2 * second[i] + s.one_minus_beta2 * (g * g);
    first[i] = m;
    second[i] = v;
    const State denominator = std::sqrt(v) * s.inverse_sqrt_correction2 + s.eps;
    const State updated = p - s.step_size * (m / denominator);
    parameter[i] = narrow<Parameter>(updated);
    if constexpr (!std::is_same_v<Rounded, Nothing>) rounded[i] = narrow<Rounded>(updated);
  }
}

template <class Parameter, class State, class Rounded>
[[gnu::always_inline]] inline void run(const OptimizerSpan& span, const AdamScalars<State>& s) {
  if (s.decoupled) {
    adam_loop<Parameter, State, Rounded, true>(span, s);
  } else {
    adam_loop<Parameter, State, Rounded, false>(span, s);
  }
}

template <class State>
struct SgdScalars {
  State lr, momentum, weight_decay;
  GradientScalars<State> gradient;
  bool has_momentum, nesterov, first_step;
  explicit SgdScalars(const SgdUpdate& u)
      : lr(static_cast<State>(u.lr)),
        momentum(static_cast<State>(u.momentum)),
        weight_decay(static_cast<State>(u.weight_decay)),
        gradient(u.gradient),
        has_momentum(u.momentum != 0),
        nesterov(u.nesterov),
        first_step(u.step == 1) {}
};

template <class Parameter, class State, class Rounded>
[[gnu::always_inline]] inline void run(const OptimizerSpan& span, const SgdScalars<State>& s) {
  auto* __restrict parameter = reinterpret_cast<Parameter*>(span.parameter);
  const auto* __restrict gradient = reinterpret_cast<const State*>(span.gradient);
  auto* __restrict first = reinterpret_cast<State*>(span.first);
  [[maybe_unused]] auto* __restrict rounded = reinterpret_cast<Rounded*>(span.rounded);
  for (std::int64_t i = 0; i < span.numel; ++i) {
    const State p = static_cast<State>(widen(parameter[i]));
    State g = s.gradient(gradient[i]) + s.weight_decay * p;
    if (s.has_momentum) {
      const State buffer = s.first_step ? g : s.momentum * first[i] + g;
      first[i] = buffer;
      g = s.nesterov ? g + s.momentum * buffer : buffer;
    }
    const State updated = p - s.lr * g;
    parameter[i] = narrow<Parameter>(updated);
    if constexpr (!std::is_same_v<Rounded, Nothing>) rounded[i] = narrow<Rounded>(updated);
  }
}

// One function for each combination of types, since clones are made of functions. What rounds to fp16 is left to the
// compiler's own conversion.
#define FSDP_FOR_SCALARS(Scalars)                                                                          \
  FSDP_VECTOR_DISPATCH void run_f32(const OptimizerSpan& span, const Scalars<float>& s) {                  \
    run<float, float, Nothing>(span, s);                                                                   \
  }                                                                                                        \
  FSDP_VECTOR_DISPATCH void run_f64(const OptimizerSpan& span, const Scalars<double>& s) {                 \
    run<double, double, Nothing>(span, s);                                                                 \
  }                                                                                                        \
  FSDP_VECTOR_DISPATCH void run_bf16(const OptimizerSpan& span, const Scalars<float>& s) {                 \
    run<BFloat16, float, Nothing>(span, s);                                                                \
  }                                                                                                        \
  FSDP_VECTOR_DISPATCH void run_f32_to_bf16(const OptimizerSpan& span, const Scalars<float>& s) {          \
    run<float, float, BFloat16>(span, s);                                                                  \
  }                                                                                                        \
  void run_f16(const OptimizerSpan& span, const Scalars<float>& s) { run<Half, float, Nothing>(span, s); } \
  void run_f32_to_f16(const OptimizerSpan& span, const Scalars<float>& s) { run<float, float, Half>(span, s); }
FSDP_FOR_SCALARS(AdamScalars)
FSDP_FOR_SCALARS(SgdScalars)
#undef FSDP_FOR_SCALARS

template <template <class> class Scalars, class Update>
void dispatch(const OptimizerSpan& span, const Update& update) {
  if (span.dtype == DType::kFloat64) return run_f64(span, Scalars<double>(update));
  const Scalars<float> scalars(update);
  switch (span.dtype) {
    case DType::kBFloat16: return run_bf16(span, scalars);
    case DType::kFloat16: return run_f16(span, scalars);
    default: break;
  }
  if (span.rounded == nullptr) return run_f32(span, scalars);
  return span.rounded_dtype == DType::kFloat16 ? run_f32_to_f16(span, scalars) : run_f32_to_bf16(span, scalars);
}

// Eight running results, so that the order is fixed and the loop still fills a vector.
template <class Element, class Term, class Combine>
[[gnu::always_inline]] inline double fold(const std::byte* bytes, std::int64_t numel, const Term& term,
                                          const Combine& combine) {
  constexpr std::int64_t kLanes = 8;
  const auto* data = reinterpret_cast<const Element*>(bytes);
  std::array<double, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      double& sum = sums[static_cast<std::size_t>(lane)];
      sum = combine(sum, term(static_cast<double>(data[i + lane])));
    }
  }
  for (; i < numel; ++i) {
    double& sum = sums[static_cast<std::size_t>(i % kLanes)];
    sum = combine(sum, term(static_cast<double>(data[i])));
  }
  return combine(combine(combine(sums[0], sums[4]), combine(sums[2], sums[6])),
                 combine(combine(sums[1], sums[5]), combine(sums[3], sums[7])));
}

[[gnu::always_inline]] inline double add(double a, double b) { return a + b; }
[[gnu::always_inline]] inline double larger(double a, double b) { return a > b || a != a ? a : b; }  // a NaN stays

template <class Element>
[[gnu::always_inline]] inline double squares(const std::byte* data, std::int64_t numel) {
  return fold<Element>(
      data, numel, [](double x) { return x * x; }, add);
}

FSDP_VECTOR_DISPATCH double squares_f32(const std::byte* data, std::int64_t numel) {
  return squares<float>(data, numel);
}
FSDP_VECTOR_DISPATCH double squares_f64(const std::byte* data, std::int64_t numel) {
  return squares<double>(data, numel);
}

template <class Element>
double norm_part_of(const std::byte* data, std::int64_t numel, double p) {
  if (std::isinf(p))
    return fold<Element>(
        data, numel, [](double x) { return std::abs(x); }, larger);
  if (p == 1)
    return fold<Element>(
        data, numel, [](double x) { return std::abs(x); }, add);
  return fold<Element>(
      data, numel, [p](double x) { return std::pow(std::abs(x), p); }, add);
}

template <class Element>
[[gnu::always_inline]] inline void average_loop(std::byte* to, const std::byte* from, std::int64_t numel,
                                                double decay) {
  auto* __restrict average = reinterpret_cast<Element*>(to);
  const auto* __restrict value = reinterpret_cast<const Element*>(from);
  const auto kept = static_cast<Element>(decay), added = static_cast<Element>(1 - decay);
  for (std::int64_t i = 0; i < numel; ++i) average[i] = kept * average[i] + added * value[i];
}

FSDP_VECTOR_DISPATCH void average_f32(std::byte* to, const std::byte* from, std::int64_t numel, double decay) {
  average_loop<float>(to, from, numel, decay);
}
FSDP_VECTOR_DISPATCH void average_f64(std::byte* to, const std::byte* from, std::int64_t numel, double decay) {
  average_loop<double>(to, from, numel, decay);
}

template <class To, class From>
void cast_run(std::byte* to, const std::byte* from, std::int64_t numel) {
  auto* __restrict target = reinterpret_cast<To*>(to);
  const auto* __restrict source = reinterpret_cast<const From*>(from);
  for (std::int64_t i = 0; i < numel; ++i) target[i] = narrow<To>(widen(source[i]));
}

}  // namespace

void adam_update(const OptimizerSpan& span, const AdamUpdate& update) { dispatch<AdamScalars>(span, update); }
void sgd_update(const OptimizerSpan& span, const SgdUpdate& update) { dispatch<SgdScalars>(span, update); }

double norm_part(const std::byte* data, std::int64_t numel, DType dtype, double p) {
  const bool is_double = dtype == DType::kFloat64;
  if (p == 2) return is_double ? squares_f64(data, numel) : squares_f32(data, numel);
  return is_double ? norm_part_of<double>(data, numel, p) : norm_part_of<float>(data, numel, p);
}

double combine_norm_parts(double a, double b, double p) { return std::isinf(p) ? larger(a, b) : a + b; }

double norm_of(double part, double p) {
  if (std::isinf(p)) return part;
  return p == 2 ? std::sqrt(part) : std::pow(part, 1 / p);
}

void average_update(std::byte* average, const std::byte* value, std::int64_t numel, DType dtype, double decay) {
  (dtype == DType::kFloat64 ? average_f64 : average_f32)(average, value, numel, decay);
}

void cast_elements(std::byte* to, DType to_dtype, const std::byte* from, DType from_dtype, std::int64_t numel) {
  if (from_dtype == DType::kFloat32 && to_dtype == DType::kBFloat16) return cast_run<BFloat16, float>(to, from, numel);
  if (from_dtype == DType::kFloat32 && to_dtype == DType::kFloat16) return cast_run<Half, float>(to, from, numel);
  if (from_dtype == DType::kBFloat16 && to_dtype == DType::kFloat32) return cast_run<float, BFloat16>(to, from, numel);
  if (from_dtype == DType::kFloat16 && to_dtype == DType::kFloat32) return cast_run<float, Half>(to, from, numel);
  throw std::logic_error("cast_elements: no such pair of types");
}

}  // namespace fsdp
