#include "sharding/touch.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <fsdp/error.h>

#include "memory/torch_compat.h"
#include "memory/torch_storage.h"
#include "sharding/deferred_init.h"

namespace fsdp {
namespace {

using Storages = c10::SmallVector<PagedStorage*, 4>;

struct OperatorTraits {
  std::string name{};
  TouchTreatment treatment = TouchTreatment::kUse;
  std::vector<bool> writes{};  // per argument
  bool adds_in_place = false;  // what autograd does to a gradient that is there already
  bool zeroes = false;         // what zero_grad(false) does to it
  FillingOperator fills = FillingOperator::kNone;
};

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

TouchTreatment treatment_of(const c10::OperatorHandle& op, std::string_view name) {
  const bool metadata_only = is_one_of(name, {"aten::empty_like",
                                              "aten::zeros_like",
                                              "aten::ones_like",
                                              "aten::full_like",
                                              "aten::rand_like",
                                              "aten::randn_like",
                                              "aten::randint_like",
                                              "aten::new_empty",
                                              "aten::new_zeros",
                                              "aten::new_ones",
                                              "aten::new_full",
                                              "aten::new_empty_strided",
                                              "aten::is_same_size",
                                              "aten::_has_compatible_shallow_copy_type",
                                              "aten::result_type",
                                              "aten::is_floating_point",
                                              "aten::is_complex",
                                              "aten::is_signed",
                                              "aten::is_inference",
                                              "aten::size",
                                              "aten::stride",
                                              "aten::sym_size",
                                              "aten::sym_stride",
                                              "aten::sym_numel",
                                              "aten::sym_storage_offset",
                                              "aten::dim",
                                              "aten::numel",
                                              "aten::requires_grad_",
                                              "aten::retain_grad",
                                              "aten::retains_grad",
                                              "aten::is_leaf",
                                              "aten::output_nr",
                                              "aten::_version",
                                              "aten::detach_"});
  if (metadata_only) return TouchTreatment::kPass;
  if (op.hasTag(at::Tag::inplace_view) ||
      is_one_of(name, {"aten::set_", "aten::set_data", "aten::resize_", "aten::resize_as_", "aten::_lazy_clone"})) {
    return TouchTreatment::kRefuse;
  }
  const auto& returns = op.schema().returns();
  const bool returns_alias = std::any_of(returns.begin(), returns.end(), [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && !argument.alias_info()->isWrite();
  });
  return returns_alias ? TouchTreatment::kPass : TouchTreatment::kUse;
}

OperatorTraits describe(const c10::OperatorHandle& op) {
  OperatorTraits traits{.name = op.schema().name()};
  traits.treatment = treatment_of(op, traits.name);
  for (const c10::Argument& argument : op.schema().arguments()) {
    traits.writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }
  traits.adds_in_place = traits.name == "aten::add_" && op.schema().overload_name() == "Tensor";
  traits.zeroes = traits.name == "aten::zero_";
  traits.fills = filling_operator(traits.name, op.schema().overload_name());
  return traits;
}

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  // Per thread, so that the way to a kernel takes no lock.
  thread_local std::unordered_map<c10::OperatorHandle, OperatorTraits> known;
  const auto found = known.find(op);
  return found != known.end() ? found->second : known.emplace(op, describe(op)).first->second;
}

template <class Visit>
void for_each_touched(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && carries_touch_key(tensor)) visit(tensor);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined() && carries_touch_key(tensor)) visit(tensor);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_touched(element, visit);
  }
}

[[noreturn]] void refuse(const OperatorTraits& traits, const PagedStorage& storage, const at::Tensor& tensor) {
  throw InvalidArgument(fmt::format(
      "{} of parameter {} is refused: it would give the parameter another storage or shape than the engine's; change "
      "the values in place "
      "(copy_, torch::nn::init) under torch::NoGradGuard, or call fsdp::shard afterwards",
      traits.name,
      storage.owner() != nullptr ? storage.owner()->parameter_name(storage, tensor) : "of a closed engine"));
}

// The storages of one operator, held from acquire() to complete() or destruction, engine by engine.
class Use {
 public:
  Use(const OperatorTraits& traits, Storages storages, bool writes)
      : name_(traits.name), storages_(std::move(storages)), writes_(writes) {
    const auto by_owner = [](const auto* a, const auto* b) { return a->owner() < b->owner(); };
    if (!std::is_sorted(storages_.begin(), storages_.end(), by_owner))
      std::stable_sort(storages_.begin(), storages_.end(), by_owner);
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() {
    // Reached with something held only while an exception is on its way; a second one would hide it.
    try {
      release(/*completed=*/false);
    } catch (...) {
    }
  }

  void acquire() {
    for (; held_ < storages_.size(); held_ += part(held_).size()) {
      StorageOwner* owner = storages_[held_]->owner();
      if (owner == nullptr) throw InvalidArgument(fmt::format("{}: {}", name_, storages_[held_]->absent_text()));
      owner->acquire(use_of(held_));
    }
  }
  void complete() { release(/*completed=*/true); }

 private:
  std::span<PagedStorage* const> part(std::size_t begin) const {
    std::size_t end = begin;
    while (end < storages_.size() && storages_[end]->owner() == storages_[begin]->owner()) ++end;
    return {storages_.data() + begin, end - begin};
  }
  OperatorUse use_of(std::size_t begin) const { return {.name = name_, .storages = part(begin), .writes = writes_}; }

  void release(bool completed) {
    const std::size_t held = std::exchange(held_, 0);
    for (std::size_t begin = 0; begin < held; begin += part(begin).size())
      storages_[begin]->owner()->release(use_of(begin), completed);
  }

  std::string_view name_;
  Storages storages_;
  bool writes_;
  std::size_t held_ = 0;
};

struct Arguments {
  Storages parameters;
  bool writes_parameter = false;
  PagedStorage* gradient = nullptr;
};

Arguments collect(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> values) {
  Arguments arguments;
  for (std::size_t i = 0; i < values.size(); ++i) {
    for_each_touched(values[i], [&](const at::Tensor& tensor) {
      PagedStorage* storage = PagedStorage::of(tensor);
      if (storage == nullptr) return;  // replaced behind our back: the check at the step's start names it
      if (storage->role() == PagedStorage::Role::kGradient) {
        arguments.gradient = storage;
        return;
      }
      if (traits.treatment == TouchTreatment::kRefuse) refuse(traits, *storage, tensor);
      if (std::find(arguments.parameters.begin(), arguments.parameters.end(), storage) == arguments.parameters.end()) {
        arguments.parameters.push_back(storage);
      }
      arguments.writes_parameter |= traits.writes[i];
    });
  }
  return arguments;
}

// An operator on the placeholder of a gradient that has been taken away. Its first argument stays on the stack as the
// result.
void use_gradient(const OperatorTraits& traits, PagedStorage& gradient, torch::jit::Stack* stack) {
  const std::size_t count = traits.writes.size();
  StorageOwner* owner = gradient.owner();
  const c10::IValue& first = torch::jit::peek(*stack, 0, count);
  const bool is_target = first.isTensor() && PagedStorage::of(first.toTensor()) == &gradient;
  if (owner != nullptr && is_target && traits.adds_in_place && in_backward()) {
    owner->accumulate_gradient(gradient, torch::jit::peek(*stack, 1, count).toTensor());
  } else if (owner != nullptr && is_target && traits.zeroes) {
    owner->clear_gradient(gradient);
  } else {
    throw InvalidArgument(fmt::format("{}: {}", traits.name, gradient.absent_text()));
  }
  at::Tensor self = first.toTensor();
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, std::move(self));
}

void touch_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const OperatorTraits& traits = traits_of(op);
  if (defers_initialisation() && note_down(traits.fills, traits.writes.size(), stack)) return;
  const c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey);
  if (traits.treatment == TouchTreatment::kPass) {
    op.redispatchBoxed(below, stack);
    return;
  }
  Arguments arguments = collect(traits, torch::jit::last(*stack, traits.writes.size()));
  if (arguments.gradient != nullptr) {
    use_gradient(traits, *arguments.gradient, stack);
    return;
  }
  Use use(traits, std::move(arguments.parameters), arguments.writes_parameter);
  use.acquire();
  {
    const c10::impl::ExcludeDispatchKeyGuard guard(kTouchKey);
    op.redispatchBoxed(below, stack);
  }
  use.complete();
}

}  // namespace

TouchTreatment touch_treatment(std::string_view operator_name, std::string_view overload) {
  const auto op = c10::Dispatcher::singleton().findSchema({std::string(operator_name), std::string(overload)});
  if (!op) throw InvalidArgument(fmt::format("no operator {}.{}", operator_name, overload));
  return describe(*op).treatment;
}

}  // namespace fsdp

TORCH_LIBRARY_IMPL(_, FSDP_DISPATCH_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fsdp::touch_fallback>());
}
