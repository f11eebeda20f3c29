// The arithmetic of the optimizers on one run of elements of a shard. No torch, no ranks. Parameters and their
// gradients and state: fp32, bf16 and fp16 parameters have fp32 gradients and state; fp64 has fp64. The same bits on
// every CPU and for any cut into runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include <fsdp/dtype.h>

namespace fsdp {

// The type of gradients and optimizer state beside parameters of `dtype`.
constexpr DType state_dtype(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
constexpr bool is_trainable(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

// Elements [0, numel) of one parameter's piece; state pointers may be null where the optimizer has no such state.
struct OptimizerSpan {
  DType dtype = DType::kFloat32;
  std::byte* parameter = nullptr;
  const std::byte* gradient = nullptr;
  std::byte* first = nullptr;   // Adam, AdamW: exp_avg; SGD: momentum_buffer
  std::byte* second = nullptr;  // Adam, AdamW: exp_avg_sq
  std::int64_t numel = 0;
  // The updated parameter is written here, too, rounded to nearest even; kBFloat16 or kFloat16 beside fp32. May be
  // null.
  std::byte* rounded = nullptr;
  DType rounded_dtype = DType::kBFloat16;
};

// What the update sees of a gradient: clamp(gradient * scale, -limit, limit).
struct GradientUse {
  double scale = 1;
  double limit = std::numeric_limits<double>::infinity();
};

// One Adam update with bias correction. AdamW (arXiv:1711.05101, algorithm 2) has its weight decay beside the gradient,
// Adam (arXiv:1412.6980) in it:
//   AdamW: p *= 1 - lr wd;   Adam: g += wd p
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
struct AdamUpdate {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool decoupled = true;  // AdamW
  GradientUse gradient{};
  std::int64_t step = 1;  // t: updates of this parameter, this one included
};
void adam_update(const OptimizerSpan& span, const AdamUpdate& update);

// One SGD update: g = gradient + wd p; with momentum u: b = step 1 ? g : u b + g, g = nesterov ? g + u b : b; p -= lr g
struct SgdUpdate {
  double lr = 0, momentum = 0, weight_decay = 0;
  bool nesterov = false;
  GradientUse gradient{};
  std::int64_t step = 1;
};
void sgd_update(const OptimizerSpan& span, const SgdUpdate& update);

// What the p-norms of parts of a gradient are put together from: the sum of |x|^p in fp64, in a fixed order, or the
// largest |x| where p is infinite. NaN or infinite where an element is.
double norm_part(const std::byte* data, std::int64_t numel, DType dtype, double p);
double combine_norm_parts(double a, double b, double p);
double norm_of(double part, double p);

// average[i] = decay * average[i] + (1 - decay) * value[i]; fp32 or fp64.
void average_update(std::byte* average, const std::byte* value, std::int64_t numel, DType dtype, double decay);

// Between fp32 or fp64 and a type that is at most as wide; rounds to nearest even.
void cast_elements(std::byte* to, DType to_dtype, const std::byte* from, DType from_dtype, std::int64_t numel);

}  // namespace fsdp
