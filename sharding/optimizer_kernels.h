// The arithmetic of the optimizers on one run of elements of a shard. No torch, no ranks. Parameters and their
// gradients and state: fp32, bf16 and fp16 parameters have fp32 gradients and state; fp64 has fp64. The same bits on
// every CPU and for any cut into runs.
#pragma once

#include <cstddef>
#include <cstdint>

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
  std::byte* first = nullptr;   // AdamW: exp_avg; SGD: momentum_buffer
  std::byte* second = nullptr;  // AdamW: exp_avg_sq
  std::int64_t numel = 0;
};

// One AdamW update (arXiv:1711.05101, algorithm 2 with bias correction), with g = gradient * gradient_scale:
//   p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
struct AdamWUpdate {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, gradient_scale = 1;
  std::int64_t step = 1;  // t: updates of this parameter, this one included
};
void adamw_update(const OptimizerSpan& span, const AdamWUpdate& update);

// One SGD update: g = gradient * gradient_scale + wd p; with momentum u: b = step 1 ? g : u b + g, g = nesterov ? g +
// u b : b; p -= lr g
struct SgdUpdate {
  double lr = 0, momentum = 0, weight_decay = 0, gradient_scale = 1;
  bool nesterov = false;
  std::int64_t step = 1;
};
void sgd_update(const OptimizerSpan& span, const SgdUpdate& update);

// Sum of squares in fp64, added in a fixed order. NaN or infinite where an element is.
double sum_of_squares(const std::byte* data, std::int64_t numel, DType dtype);

}  // namespace fsdp
