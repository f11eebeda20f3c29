#include "sharding/sharded_model.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/deferred_storage.h"

namespace fsdp {
namespace {

[[noreturn]] void refuse(const NamedParameter& parameter, const std::string& found, const std::string& remedy) {
  throw InvalidArgument(fmt::format("fsdp::shard: parameter {} {}; {}", parameter.name, found, remedy));
}

// Two parameters that are views of one storage would both be told of a third that holds it, so this comes first.
void check_own_storage(const NamedParameter& parameter, std::unordered_map<const void*, std::string>& storages) {
  if (!parameter.tensor.has_storage()) return;
  if (DeferredStorage::of(parameter.tensor) != nullptr && DeferredStorage::whole(parameter.tensor) == nullptr) {
    refuse(parameter, "is a part of another tensor that fsdp::deferred_init made", "make it a tensor of its own");
  }
  if (carries_touch_key(parameter.tensor) && DeferredStorage::of(parameter.tensor) == nullptr) {
    refuse(parameter, "is sharded already", "one engine holds a module's parameters");
  }
  const auto [owner, is_new] = storages.emplace(parameter.tensor.storage().unsafeGetStorageImpl(), parameter.name);
  if (!is_new) {
    refuse(parameter, fmt::format("shares its storage with parameter {}", owner->second),
           "tie parameters by registering the same tensor twice, not by a view of it");
  }
}

// What a parameter that is a view was made from, where nothing but the view knows of it: `randn({n, m}).t()`.
at::Tensor own_base(const at::Tensor& tensor) {
  if (!tensor.is_view()) return {};
  const at::Tensor base(tensor._base());
  return base.use_count() == 2 ? base : at::Tensor();  // the view and this one
}

void check_shardable(const NamedParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  if (tensor.layout() != at::kStrided)
    refuse(parameter, "is not a strided tensor", "sparse parameters are not supported: use a dense one");
  if (!tensor.device().is_cpu())
    refuse(parameter, fmt::format("is on {}", tensor.device().str()),
           "expected the CPU: this build has no other device");
  if (!tensor.is_non_overlapping_and_dense())
    refuse(parameter, "overlaps itself or has holes", "give the module a contiguous() copy");
  if (tensor.storage().use_count() != (own_base(tensor).defined() ? 2 : 1)) {
    refuse(parameter,
           "shares its storage with a tensor outside the module (a view or detached copy that is still held)",
           "drop that tensor before fsdp::shard, or give the module a clone()");
  }
  if (tensor.requires_grad() && !tensor.is_leaf())
    refuse(parameter, "is not a leaf of the graph", "register a detached tensor");
  if (tensor.grad().defined()) refuse(parameter, "has a gradient already", "call zero_grad() before fsdp::shard");
  if (tensor.is_complex() || tensor.is_quantized())
    refuse(parameter, fmt::format("is {}", c10::toString(tensor.scalar_type())), "keep such a tensor as a buffer");
  if (tensor.requires_grad() && installed_gradient_hook(tensor) != nullptr) {
    refuse(parameter, "has a post-accumulate-grad hook already",
           "a tensor has room for one and the engine needs it: remove it before fsdp::shard");
  }
}

}  // namespace

ShardedModel::ShardedModel(std::vector<CutUnit> cut, const std::vector<UnitPolicy>& policies, int world_size, int rank,
                           StorageOwner* owner) {
  std::unordered_map<const void*, std::string> storages;
  for (const CutUnit& unit : cut) {
    for (const NamedParameter& parameter : unit.parameters) check_own_storage(parameter, storages);
  }
  for (const CutUnit& unit : cut) {
    for (const NamedParameter& parameter : unit.parameters) check_shardable(parameter);
  }
  for (std::size_t i = 0; i < cut.size(); ++i)
    add_unit(std::move(cut[i]), policies.at(i), {.world_size = world_size, .rank = rank, .shares = policies[i].shares});
  std::size_t transient_bytes = 0;
  for (UnitLayout& unit : units) transient_bytes = std::max(transient_bytes, lay_out(unit));
  for (FlatGroup& group : groups) {
    if (!unit_of(group).policy.keeps_gradient_shares) group.gradient_offset += gradient_bytes;
  }
  gradient_bytes += transient_bytes;
  make_storages(owner);
}

void ShardedModel::add_unit(CutUnit unit, const UnitPolicy& policy, const Mesh& mesh) {
  const int unit_index = static_cast<int>(units.size());
  UnitLayout layout{.name = std::move(unit.name), .policy = policy, .mesh = mesh, .groups = {}, .trainable = {}};
  std::map<std::pair<DType, bool>, int> group_of;
  for (NamedParameter& named : unit.parameters) {
    const DType master_dtype = to_dtype(named.tensor.scalar_type());
    const DType dtype = master_dtype == DType::kFloat32 ? policy.param : master_dtype;
    const bool trainable = named.tensor.requires_grad();
    if (trainable && !is_trainable(dtype)) {
      throw InvalidArgument(
          fmt::format("fsdp::shard: parameter {} requires grad but is {}; expected F32, F64, F16 or BF16", named.name,
                      name_of(dtype)));
    }
    const auto [group, is_new] = group_of.emplace(std::pair{master_dtype, trainable}, static_cast<int>(groups.size()));
    if (is_new) {
      groups.emplace_back();
      groups.back().unit = unit_index;
      groups.back().dtype = dtype;
      groups.back().master_dtype = master_dtype;
      groups.back().reduce_dtype = dtype == DType::kFloat32 ? policy.reduce : dtype;
      groups.back().trainable = trainable;
      layout.groups.push_back(group->second);
    }
    FlatGroup& target = groups[static_cast<std::size_t>(group->second)];
    ShardedParameter parameter;
    parameter.name = std::move(named.name);
    parameter.tied_names = std::move(named.tied_names);
    parameter.tensor = std::move(named.tensor);
    parameter.sizes = parameter.tensor.sizes().vec();
    parameter.strides = parameter.tensor.strides().vec();
    parameter.unit = unit_index;
    parameter.group = group->second;
    parameter.index_in_group = target.parameters.size();
    if (trainable) {
      parameter.trainable_index = static_cast<int>(layout.trainable.size());
      layout.trainable.push_back(static_cast<int>(parameters.size()));
    }
    target.parameters.push_back(static_cast<int>(parameters.size()));
    index_of_.emplace(parameter.tensor.unsafeGetTensorImpl(), parameters.size());
    parameters.push_back(std::move(parameter));
  }
  units.push_back(std::move(layout));
}

// Returns the bytes of its gradient shares that other units may use, too: NOTE [Update in backward].
std::size_t ShardedModel::lay_out(UnitLayout& unit) {
  bool needs_slots = !unit.policy.keeps_parameters;
  for (const int index : unit.groups) {
    FlatGroup& group = groups[static_cast<std::size_t>(index)];
    std::vector<std::int64_t> numels;
    for (const int parameter : group.parameters)
      numels.push_back(parameters[static_cast<std::size_t>(parameter)].tensor.numel());
    group.layout = std::make_unique<ShardLayout>(numels, size_of(group.dtype), unit.mesh.shares);
    for (const int parameter : group.parameters) {
      ShardedParameter& p = parameters[static_cast<std::size_t>(parameter)];
      p.piece = group.layout->piece(p.index_in_group, unit.mesh.share());
    }
    group.slot_offset = unit.bytes;
    unit.bytes += group.flat_bytes();
    needs_slots |= group.trainable && !unit.policy.keeps_gradients;
  }
  unit.parameter_offset = parameter_bytes;
  std::size_t& local_end = unit.policy.keeps_gradients ? gradient_bytes : local_bytes;
  unit.local_offset = local_end;
  std::size_t transient_end = 0;
  for (const int index : unit.groups) place(groups[static_cast<std::size_t>(index)], unit, transient_end);
  largest_unit_bytes = std::max({largest_unit_bytes, unit.bytes, local_end - unit.local_offset});
  if (needs_slots) slot_bytes = std::max(slot_bytes, unit.bytes);
  return transient_end;
}

// Gives the group its place in each segment; NOTE [Strategies].
void ShardedModel::place(FlatGroup& group, const UnitLayout& unit, std::size_t& transient_end) {
  const auto take = [](std::size_t& end, std::size_t bytes) { return std::exchange(end, end + bytes); };
  group.parameter_stride = unit.policy.keeps_parameters ? group.shard_bytes() : 0;
  group.parameter_offset = take(parameter_bytes,
                                unit.policy.keeps_parameters ? group.flat_bytes() : group.shard_bytes());
  const std::int64_t numel = group.layout->numel(), shard_numel = group.layout->shard_numel();
  if (group.has_master()) group.master_offset = take(master_bytes, bytes_of(shard_numel, group.master_dtype));
  if (!group.trainable) return;
  const DType dtype = group.gradient_dtype();
  group.state_offset = take(state_bytes, bytes_of(shard_numel, dtype));
  if (unit.policy.keeps_gradients) {
    group.gradient_stride = bytes_of(shard_numel, dtype);
    group.gradient_offset = group.local_offset = take(gradient_bytes, bytes_of(numel, dtype));
  } else {
    group.gradient_offset = take(unit.policy.keeps_gradient_shares ? gradient_bytes : transient_end,
                                 bytes_of(shard_numel, dtype));
    group.local_offset = take(local_bytes, bytes_of(numel, dtype));
  }
}

void ShardedModel::make_storages(StorageOwner* owner) {
  for (std::size_t index = 0; index < units.size(); ++index) {
    for (const int group : units[index].groups) {
      FlatGroup& g = groups[static_cast<std::size_t>(group)];
      g.storage = c10::make_intrusive<PagedStorage>(
          g.flat_bytes(), PagedStorage::Role::kParameters, owner, group,
          fmt::format(
              "parameters of unit {} are sharded and not resident: a raw pointer was asked for outside of an operator; "
              "read parameters through operators (clone(), copy_()), which gather them first",
              units[index].name));
    }
  }
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    ShardedParameter& p = parameters[index];
    if (p.trainable_index < 0) continue;
    p.gradient_storage = c10::make_intrusive<PagedStorage>(
        bytes_of(p.tensor.numel(), group_of(p).dtype), PagedStorage::Role::kGradient, owner, static_cast<int>(index),
        fmt::format("gradients are sharded: this rank holds a part of the gradient of {} only; clip and step through "
                    "fsdp::Optimizer::step, read gradients through fsdp::Engine::gradient_views",
                    p.name));
  }
}

void ShardedModel::take_over(const std::shared_ptr<GradientHook>& hook) {
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard guard(kTouchKey);  // a deferred tensor would refuse other storage
  for (ShardedParameter& p : parameters) {
    const FlatGroup& group = group_of(p);
    if (p.trainable_index >= 0) {
      p.placeholder = make_touch_view(p.gradient_storage, p.tensor.detach(), group.dtype, 0);
      p.hook = install_gradient_hook(p.tensor, hook);
    }
    p.tensor.set_data(make_touch_view(group.storage, p.tensor.detach(), group.dtype,
                                      group.layout->parameters()[p.index_in_group].offset));
    // The view keeps its base, which would keep the whole values.
    if (at::Tensor base = own_base(p.tensor); base.defined()) base.set_data(at::empty({0}, base.options()));
  }
}

void ShardedModel::release() {
  constexpr const char* kGone =
      "the engine of this parameter is gone; keep the fsdp::Engine as long as its module is used";
  for (FlatGroup& group : groups) group.storage->orphan(kGone);
  for (ShardedParameter& p : parameters) {
    if (p.gradient_storage) p.gradient_storage->orphan(kGone);
    if (p.hook != nullptr && installed_gradient_hook(p.tensor) == p.hook) remove_gradient_hook(p.tensor);
  }
}

void ShardedModel::check_identity() const {
  for (const ShardedParameter& p : parameters) check_identity(p);
}

void ShardedModel::check_identity(const ShardedParameter& p) const {
  const FlatGroup& group = group_of(p);
  const auto refuse = [&](const char* found, const char* remedy) {
    throw InvalidArgument(fmt::format("parameter {} of unit {} {} after fsdp::shard; {}", p.name,
                                      units[static_cast<std::size_t>(p.unit)].name, found, remedy));
  };
  if (p.tensor.storage().unsafeGetStorageImpl() != group.storage.get() || !carries_touch_key(p.tensor) ||
      p.tensor.storage_offset() != group.layout->parameters()[p.index_in_group].offset) {
    refuse("was given other storage (torch::load, Module::to or set_data)",
           "load and convert the module before fsdp::shard, or use fsdp::Engine::resume and load_consolidated");
  }
  // The storage cannot tell: an out= operator resizes the parameter it writes, and the next gradient would have that
  // shape.
  if (p.tensor.sizes() != at::IntArrayRef(p.sizes) || p.tensor.strides() != at::IntArrayRef(p.strides)) {
    refuse("was given another shape (an out= operator resizes what it writes)",
           "give out= operators results of the parameter's own shape");
  }
  if (p.trainable_index >= 0 && installed_gradient_hook(p.tensor) != p.hook) {
    refuse("had its gradient hook replaced", "a tensor has one post-accumulate-grad slot and the engine needs it");
  }
  if (p.trainable_index < 0 && p.tensor.requires_grad()) {
    refuse("was set to require grad",
           "set requires_grad before fsdp::shard: frozen parameters have no gradient or optimizer space");
  }
}

std::string ShardedModel::parameter_name(const PagedStorage& storage, const at::Tensor& tensor) const {
  if (storage.role() == PagedStorage::Role::kGradient)
    return parameters[static_cast<std::size_t>(storage.index())].name;
  const FlatGroup& group = groups[static_cast<std::size_t>(storage.index())];
  std::string name;
  for (const int index : group.parameters) {
    const ShardedParameter& p = parameters[static_cast<std::size_t>(index)];
    const std::int64_t offset = group.layout->parameters()[p.index_in_group].offset;
    const bool is_empty = p.tensor.numel() == 0;
    // A parameter without elements lies where the next one does.
    if (is_empty && tensor.numel() == 0 && offset == tensor.storage_offset()) return p.name;
    if (!is_empty && offset <= tensor.storage_offset()) name = p.name;
  }
  return name;
}

}  // namespace fsdp
