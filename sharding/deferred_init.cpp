#include "sharding/deferred_init.h"

#include <fsdp/deferred_init.h>

#include <array>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include <fsdp/error.h>

#include "memory/torch_compat.h"
#include "sharding/deferred_storage.h"

namespace fsdp {
namespace {

constexpr std::size_t kDeferredBytes = std::size_t{64} << 10;

struct ActiveScope {
  explicit ActiveScope(std::uint64_t the_seed) : seed(the_seed), include(kTouchKey) {}
  std::uint64_t seed;
  std::uint64_t draws = 0;
  c10::impl::IncludeDispatchKeyGuard include;  // factories come to the fallback, too
};
thread_local std::optional<ActiveScope> active_scope;

FillNote value_note(std::int64_t numel, double value) {
  return {.kind = FillNote::Kind::kValue, .numel = numel, .a = value};
}

FillNote random_note(FillNote::Kind kind, std::int64_t numel, double a, double b) {
  return {.kind = kind, .numel = numel, .a = a, .b = b, .draw = {active_scope->seed, active_scope->draws++}};
}

std::optional<std::vector<std::int64_t>> sizes_of(const c10::IValue& value) {
  if (value.isIntList()) return value.toIntVector();
  return std::nullopt;
}

bool is_cpu_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

// The arguments of a factory after its sizes and value: dtype, layout, device, pin_memory, ...
std::optional<DType> plain_cpu_type(const torch::jit::Stack& stack, std::size_t arguments, std::size_t first) {
  const auto argument = [&](std::size_t i) -> const c10::IValue& { return torch::jit::peek(stack, i, arguments); };
  const at::ScalarType type = argument(first).isNone() ? c10::get_default_dtype_as_scalartype()
                                                       : argument(first).toScalarType();
  const bool strided = argument(first + 1).isNone() || argument(first + 1).toLayout() == at::kStrided;
  const bool cpu = argument(first + 2).isNone() || argument(first + 2).toDevice().is_cpu();
  const bool pageable = argument(first + 3).isNone() || !argument(first + 3).toBool();
  if (!is_cpu_floating(type) || !strided || !cpu || !pageable) return std::nullopt;
  if (first + 4 < arguments && !argument(first + 4).isNone()) return std::nullopt;  // a memory format
  return to_dtype(type);
}

bool make_deferred(FillingOperator op, std::size_t arguments, torch::jit::Stack* stack) {
  const bool has_value = op == FillingOperator::kFull;
  const auto sizes = sizes_of(torch::jit::peek(*stack, 0, arguments));
  const auto dtype = plain_cpu_type(*stack, arguments, has_value ? 2 : 1);
  if (!sizes || !dtype) return false;
  std::int64_t numel = 1;
  for (const std::int64_t size : *sizes) {
    if (size < 0) return false;  // the operator says so better
    numel *= size;
  }
  const bool random = op == FillingOperator::kRand || op == FillingOperator::kRandn;
  const bool small = bytes_of(numel, *dtype) < kDeferredBytes;
  if (small && !random) return false;
  std::optional<FillNote> note;
  if (op == FillingOperator::kOnes) note = value_note(numel, 1);
  if (has_value) note = value_note(numel, torch::jit::peek(*stack, 1, arguments).toScalar().toDouble());
  if (op == FillingOperator::kRand) note = random_note(FillNote::Kind::kUniform, numel, 0, 1);
  if (op == FillingOperator::kRandn) note = random_note(FillNote::Kind::kNormal, numel, 0, 1);
  const auto storage = c10::make_intrusive<DeferredStorage>(numel, *dtype);
  if (note) storage->note(*note);
  at::Tensor made = make_touch_tensor(storage, *sizes, *dtype);
  torch::jit::drop(*stack, arguments);
  torch::jit::push(*stack, small ? materialized(made) : made);
  return true;
}

std::optional<FillNote> note_of(FillingOperator op, std::int64_t numel, const torch::jit::Stack& stack,
                                std::size_t arguments) {
  const auto number = [&](std::size_t i) { return torch::jit::peek(stack, i, arguments).toScalar().toDouble(); };
  switch (op) {
    case FillingOperator::kZero: return value_note(numel, 0);
    case FillingOperator::kFill: return value_note(numel, number(1));
    case FillingOperator::kUniform:
    case FillingOperator::kNormal: {
      if (!torch::jit::peek(stack, 3, arguments).isNone()) return std::nullopt;  // a generator of the user's own
      const bool uniform = op == FillingOperator::kUniform;
      if (uniform ? number(1) > number(2) : number(2) < 0) return std::nullopt;  // the operator says so better
      return random_note(uniform ? FillNote::Kind::kUniform : FillNote::Kind::kNormal, numel, number(1), number(2));
    }
    default: return std::nullopt;
  }
}

bool fill(FillingOperator op, std::size_t arguments, torch::jit::Stack* stack) {
  at::Tensor self = torch::jit::peek(*stack, 0, arguments).toTensor();
  if (!self.defined() || !self.has_storage() || !self.device().is_cpu() || !is_cpu_floating(self.scalar_type()) ||
      !self.is_non_overlapping_and_dense() || (self.requires_grad() && at::GradMode::is_enabled())) {
    return false;
  }
  DeferredStorage* deferred = DeferredStorage::of(self);
  const bool random = op == FillingOperator::kUniform || op == FillingOperator::kNormal;
  if (deferred == nullptr && (!random || carries_touch_key(self))) return false;
  if (deferred != nullptr && to_dtype(self.scalar_type()) != deferred->dtype()) return false;
  std::optional<FillNote> note = note_of(op, self.numel(), *stack, arguments);
  if (!note) return false;
  if (deferred != nullptr) {
    note->begin = self.storage_offset();
    deferred->note(*note);
  } else {
    apply(*note, to_dtype(self.scalar_type()), 0, self.numel(), static_cast<std::byte*>(self.mutable_data_ptr()));
  }
  bump_version(self);
  torch::jit::drop(*stack, arguments);
  torch::jit::push(*stack, std::move(self));
  return true;
}

}  // namespace

FillingOperator filling_operator(std::string_view name, std::string_view overload) {
  using Named = std::pair<std::string_view, FillingOperator>;
  constexpr std::array<Named, 10> kNamed{Named{"aten::empty.memory_format", FillingOperator::kEmpty},
                                         {"aten::zeros.", FillingOperator::kZeros},
                                         {"aten::ones.", FillingOperator::kOnes},
                                         {"aten::full.", FillingOperator::kFull},
                                         {"aten::rand.", FillingOperator::kRand},
                                         {"aten::randn.", FillingOperator::kRandn},
                                         {"aten::uniform_.", FillingOperator::kUniform},
                                         {"aten::normal_.", FillingOperator::kNormal},
                                         {"aten::fill_.Scalar", FillingOperator::kFill},
                                         {"aten::zero_.", FillingOperator::kZero}};
  for (const auto& [known, op] : kNamed) {
    const std::size_t dot = known.rfind('.');
    if (known.substr(0, dot) == name && known.substr(dot + 1) == overload) return op;
  }
  return FillingOperator::kNone;
}

bool defers_initialisation() { return active_scope.has_value(); }

bool note_down(FillingOperator op, std::size_t arguments, torch::jit::Stack* stack) {
  if (op == FillingOperator::kNone) return false;
  const c10::impl::ExcludeDispatchKeyGuard guard(kTouchKey);
  const bool makes = op <= FillingOperator::kRandn;
  return makes ? make_deferred(op, arguments, stack) : fill(op, arguments, stack);
}

DeferredInitScope::DeferredInitScope(std::uint64_t seed) {
  if (active_scope) throw InvalidArgument("fsdp::deferred_init: expected no open scope on this thread, got a second");
  active_scope.emplace(seed);
}

DeferredInitScope::~DeferredInitScope() { active_scope.reset(); }

void materialize(torch::nn::Module& module) {
  for (at::Tensor& parameter : module.parameters()) materialize_in_place(parameter);
  for (at::Tensor& buffer : module.buffers()) materialize_in_place(buffer);
}

}  // namespace fsdp
