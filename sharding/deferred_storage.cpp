#include "sharding/deferred_storage.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <fsdp/error.h>

#include "memory/torch_compat.h"

namespace fsdp {
namespace {

// Owns nothing: a storage knows by itself how to be filled.
class DeferredOwner final : public StorageOwner {
 public:
  void acquire(const OperatorUse& use) override {
    std::size_t held = 0;
    try {
      for (; held < use.storages.size(); ++held) static_cast<DeferredStorage*>(use.storages[held])->acquire();
    } catch (...) {
      while (held > 0) static_cast<DeferredStorage*>(use.storages[--held])->release(/*wrote=*/false);
      throw;
    }
  }
  void release(const OperatorUse& use, bool /*completed*/) override {
    for (PagedStorage* storage : use.storages) static_cast<DeferredStorage*>(storage)->release(use.writes);
  }
  void accumulate_gradient(PagedStorage&, const at::Tensor&) override {}
  void clear_gradient(PagedStorage&) override {}
  std::string parameter_name(const PagedStorage&, const at::Tensor&) const override {
    return "that fsdp::deferred_init made";
  }
};

StorageOwner* deferred_owner() {
  static DeferredOwner owner;  // without state
  return &owner;
}

}  // namespace

void apply(const FillNote& note, DType dtype, std::int64_t begin, std::int64_t numel, std::byte* output) {
  switch (note.kind) {
    case FillNote::Kind::kValue: return fill_value(output, dtype, numel, note.a);
    case FillNote::Kind::kUniform: return fill_uniform(output, dtype, begin, numel, note.draw, note.a, note.b);
    case FillNote::Kind::kNormal: return fill_normal(output, dtype, begin, numel, note.draw, note.a, note.b);
  }
}

DeferredStorage::DeferredStorage(std::int64_t numel, DType dtype)
    : PagedStorage(bytes_of(numel, dtype), Role::kParameters, deferred_owner(), /*index=*/0,
                   "a tensor made within fsdp::deferred_init has no memory: a raw pointer was asked for outside of an "
                   "operator; fill it by operators, or make it before the scope"),
      numel_(numel),
      dtype_(dtype) {}

DeferredStorage* DeferredStorage::of(const at::Tensor& tensor) {
  return dynamic_cast<DeferredStorage*>(PagedStorage::of(tensor));
}

DeferredStorage* DeferredStorage::whole(const at::Tensor& tensor) {
  DeferredStorage* storage = of(tensor);
  const bool is_whole = storage != nullptr && tensor.storage_offset() == 0 && tensor.numel() == storage->numel_ &&
                        tensor.is_non_overlapping_and_dense() &&
                        tensor.scalar_type() == to_scalar_type(storage->dtype_);
  return is_whole ? storage : nullptr;
}

void DeferredStorage::note(const FillNote& note) {
  const std::lock_guard lock(mutex_);
  if (written_) {
    apply(note, dtype_, 0, note.numel, memory_.get() + bytes_of(note.begin, dtype_));
    return;
  }
  if (note.numel == numel_) notes_.clear();
  notes_.push_back(note);
}

void DeferredStorage::fill(std::int64_t begin, std::int64_t numel, std::byte* output) const {
  const std::lock_guard lock(mutex_);
  if (written_) {
    std::memcpy(output, memory_.get() + bytes_of(begin, dtype_), bytes_of(numel, dtype_));
    return;
  }
  std::memset(output, 0, bytes_of(numel, dtype_));
  for (const FillNote& note : notes_) {
    const std::int64_t from = std::max(begin, note.begin), to = std::min(begin + numel, note.begin + note.numel);
    if (from < to) apply(note, dtype_, from - note.begin, to - from, output + bytes_of(from - begin, dtype_));
  }
}

std::uint64_t DeferredStorage::hash() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t hash = written_;
  const auto mix = [&hash](std::uint64_t value) { hash = (hash ^ value) * 1099511628211ULL; };
  for (const FillNote& note : notes_) {
    mix(static_cast<std::uint64_t>(note.kind));
    mix(static_cast<std::uint64_t>(note.begin));
    mix(static_cast<std::uint64_t>(note.numel));
    mix(std::bit_cast<std::uint64_t>(note.a));
    mix(std::bit_cast<std::uint64_t>(note.b));
    mix(note.draw.seed);
    mix(note.draw.draw);
  }
  return hash;
}

void DeferredStorage::acquire() {
  {
    const std::lock_guard lock(mutex_);
    if (++pins_ > 1 || written_) return;
  }
  auto memory = std::make_unique_for_overwrite<std::byte[]>(bytes_of(numel_, dtype_));
  fill(0, numel_, memory.get());
  const std::lock_guard lock(mutex_);
  memory_ = std::move(memory);
  point_at(memory_.get());
}

void DeferredStorage::release(bool wrote) {
  const std::lock_guard lock(mutex_);
  written_ |= wrote;
  if (--pins_ > 0 || written_) return;
  point_away();
  memory_.reset();
}

void materialize_in_place(at::Tensor& tensor) {
  if (!tensor.defined() || DeferredStorage::of(tensor) == nullptr) return;
  const at::NoGradGuard no_grad;
  const at::Tensor plain = materialized(tensor);
  const c10::impl::ExcludeDispatchKeyGuard guard(kTouchKey);
  tensor.set_data(plain);
}

at::Tensor materialized(const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kTouchKey);
  at::Tensor plain = at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
  DeferredStorage* whole = DeferredStorage::whole(tensor);
  if (whole == nullptr)
    throw InvalidArgument(
        "fsdp::deferred_init: a parameter or buffer is a part of another tensor that was made there; "
        "make it a tensor of its own");
  whole->fill(0, tensor.numel(), static_cast<std::byte*>(plain.mutable_data_ptr()));
  return plain;
}

}  // namespace fsdp
