// All that libfsdp uses of LibTorch's internals. Each item is tried by a small program at configure time or by
// tests/memory/torch_compat_test.cpp; no other file includes an internal header of LibTorch.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>

#include <fsdp/dtype.h>

#ifndef FSDP_DISPATCH_KEY
#error "FSDP_DISPATCH_KEY is set by cmake/FsdpDispatchKey.cmake, which tries it"
#endif

namespace fsdp {

// The spare key that parameters carry; see docs/architecture.md. Chosen when libfsdp is configured.
constexpr c10::DispatchKey kTouchKey = c10::DispatchKey::FSDP_DISPATCH_KEY;
std::string_view touch_key_name();

DType to_dtype(at::ScalarType type);  // throws InvalidArgument for a type that checkpoints cannot hold
at::ScalarType to_scalar_type(DType dtype);

// A tensor over `storage` that carries kTouchKey, with the sizes and strides of `like`; offset in elements.
at::Tensor make_touch_view(const c10::intrusive_ptr<c10::StorageImpl>& storage, const at::Tensor& like, DType dtype,
                           std::int64_t offset);
// A contiguous CPU tensor over all of `storage` that carries kTouchKey.
at::Tensor make_touch_tensor(const c10::intrusive_ptr<c10::StorageImpl>& storage, at::IntArrayRef sizes, DType dtype);
// A plain tensor over borrowed memory, with the sizes and strides of `like`.
at::Tensor make_plain_view(void* data, const at::Tensor& like, DType dtype);

inline bool carries_touch_key(const at::Tensor& tensor) { return tensor.key_set().has(kTouchKey); }

// Makes a later use of a graph that saved this tensor throw, as an in-place write would.
void bump_version(const at::Tensor& tensor);

// The calling thread is executing a backward pass.
bool in_backward();
// REQUIRES in_backward(). It is one that accumulates into every leaf, not into a few that were asked for.
bool backward_reaches_every_leaf();

// What runs when a leaf's gradient has been accumulated. No other thread adds to the gradient while it runs; where
// several add at once, one call may find what all have added, and the others nothing.
class GradientHook {
 public:
  virtual ~GradientHook() = default;
  virtual void on_gradient(const at::Tensor& parameter) = 0;
};
// Puts the hook in the tensor's one post-accumulate slot; returns what identifies it there. REQUIRES an empty slot.
const void* install_gradient_hook(const at::Tensor& parameter, std::shared_ptr<GradientHook> hook);
const void* installed_gradient_hook(const at::Tensor& parameter);
void remove_gradient_hook(const at::Tensor& parameter);

}  // namespace fsdp
