#include "memory/torch_compat.h"

#include <mutex>
#include <string_view>

#include <ATen/ops/from_blob.h>
#include <c10/core/TensorImpl.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

// LibTorch adds to a gradient under its accumulator's mutex, but runs the hook after it. The member is protected, and
// reached as a member of a class derived from its own.
struct AccumulatorMutex : torch::autograd::Node {
  // REQUIRES that the accumulator lives; while it runs, it does.
  static std::mutex& of(const at::Tensor& parameter) {
    return torch::autograd::impl::grad_accumulator(parameter).get()->*(&AccumulatorMutex::mutex_);
  }
};

// The slot owns its hook; ours is shared by all parameters of an engine and must outlive a backward in flight.
class HookAdapter final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit HookAdapter(std::shared_ptr<GradientHook> hook) : hook_(std::move(hook)) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    const std::lock_guard lock(AccumulatorMutex::of(parameter));
    hook_->on_gradient(parameter);
  }

 private:
  std::shared_ptr<GradientHook> hook_;
};

}  // namespace

std::string_view touch_key_name() { return c10::toString(kTouchKey); }

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kLong: return DType::kInt64;
    case at::kInt: return DType::kInt32;
    case at::kShort: return DType::kInt16;
    case at::kChar: return DType::kInt8;
    case at::kByte: return DType::kUInt8;
    case at::kBool: return DType::kBool;
    default: break;
  }
  throw InvalidArgument(fmt::format(
      "expected a parameter of a real floating, integer or bool type, got {}; keep such a tensor as a buffer",
      c10::toString(type)));
}

at::ScalarType to_scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return at::kFloat;
    case DType::kFloat64: return at::kDouble;
    case DType::kFloat16: return at::kHalf;
    case DType::kBFloat16: return at::kBFloat16;
    case DType::kInt64: return at::kLong;
    case DType::kInt32: return at::kInt;
    case DType::kInt16: return at::kShort;
    case DType::kInt8: return at::kChar;
    case DType::kUInt8: return at::kByte;
    case DType::kBool: return at::kBool;
  }
  return at::kFloat;
}

at::Tensor make_touch_view(const c10::intrusive_ptr<c10::StorageImpl>& storage, const at::Tensor& like, DType dtype,
                           std::int64_t offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), like.key_set().add(kTouchKey),
                                                   c10::scalarTypeToTypeMeta(to_scalar_type(dtype)));
  impl->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  return at::Tensor(std::move(impl));
}

at::Tensor make_touch_tensor(const c10::intrusive_ptr<c10::StorageImpl>& storage, at::IntArrayRef sizes, DType dtype) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage),
      c10::DispatchKeySet(
          {c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU, kTouchKey}),
      c10::scalarTypeToTypeMeta(to_scalar_type(dtype)));
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

at::Tensor make_plain_view(void* data, const at::Tensor& like, DType dtype) {
  return at::from_blob(data, like.sizes(), like.strides(), at::TensorOptions(to_scalar_type(dtype)));
}

void bump_version(const at::Tensor& tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

bool backward_reaches_every_leaf() { return torch::autograd::Engine::get_default_engine().is_checkpoint_valid(); }

const void* install_gradient_hook(const at::Tensor& parameter, std::shared_ptr<GradientHook> hook) {
  auto adapter = std::make_unique<HookAdapter>(std::move(hook));
  const void* identity = adapter.get();
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(adapter));
  return identity;
}

const void* installed_gradient_hook(const at::Tensor& parameter) {
  return torch::autograd::impl::post_acc_grad_hooks(parameter).get();
}

void remove_gradient_hook(const at::Tensor& parameter) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
}

}  // namespace fsdp
