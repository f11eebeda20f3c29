#include "tests/support/test_device.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace fsdp::testing {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

class CountingDeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, test_device()};
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    live_ += bytes;
    return {data, new Allocation{data, bytes}, &release, test_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  static std::size_t live() { return live_; }

 private:
  struct Allocation {
    void* data;
    std::size_t bytes;
  };
  static void release(void* context) {
    const auto* allocation = static_cast<Allocation*>(context);
    if (allocation == nullptr) return;
    live_ -= allocation->bytes;
    std::free(allocation->data);
    delete allocation;
  }
  static inline std::atomic<std::size_t> live_{0};
};

// deviceCount() stays 0: the device has no generator of its own.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

CountingDeviceAllocator allocator;
Hooks hooks;
const bool registered = [] {
  c10::SetAllocator(kType, &allocator);
  c10::register_privateuse1_backend("test_device");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), at::dtype(tensor.dtype()));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  as_host(target).copy_(as_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) {
    const at::Tensor larger = at::empty(source.sizes(), target.options());
    target.unsafeGetTensorImpl()->set_storage_keep_dtype(larger.storage());
    target.unsafeGetTensorImpl()->set_sizes_contiguous(source.sizes());
  }
  return copy_from(source, target, false);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device exchangeDevice(c10::Device) const override { return test_device(); }
  c10::Device getDevice() const override { return test_device(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

c10::Device test_device() { return {kType, 0}; }
std::size_t test_device_bytes() { return CountingDeviceAllocator::live(); }

}  // namespace fsdp::testing
