#include "sharding/shard_tensor_optimizer.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <typeinfo>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

at::Tensor flat_view(std::byte* data, std::int64_t numel, DType dtype) {
  return at::from_blob(data, {numel}, at::TensorOptions(to_scalar_type(dtype)));
}

// LibTorch makes a shard's state in its first step; made beforehand, as that step would, a checkpoint can be loaded
// into it.
template <class Options>
std::unique_ptr<torch::optim::OptimizerParamState> make_adam_state(const at::Tensor& shard, const Options& options) {
  auto state = std::make_unique<std::conditional_t<std::is_same_v<Options, torch::optim::AdamOptions>,
                                                   torch::optim::AdamParamState, torch::optim::AdamWParamState>>();
  state->exp_avg(at::zeros_like(shard));
  state->exp_avg_sq(at::zeros_like(shard));
  if (options.amsgrad()) state->max_exp_avg_sq(at::zeros_like(shard));
  return state;
}

std::unique_ptr<torch::optim::OptimizerParamState> make_state(const at::Tensor& shard,
                                                              const torch::optim::OptimizerOptions& group) {
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&group)) return make_adam_state(shard, *adam);
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&group))
    return make_adam_state(shard, *adamw);
  if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(&group)) {
    auto state = std::make_unique<torch::optim::RMSpropParamState>();
    state->square_avg(at::zeros_like(shard));
    if (rmsprop->momentum() > 0) state->momentum_buffer(at::zeros_like(shard));
    if (rmsprop->centered()) state->grad_avg(at::zeros_like(shard));
    return state;
  }
  const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&group);
  if (sgd == nullptr || sgd->momentum() == 0) return nullptr;
  if (sgd->dampening() != 0) {
    throw InvalidArgument(
        fmt::format("TorchOptimizer: SGD with dampening {}, which its first step does not apply, so that its state "
                    "cannot be made beforehand; leave dampening 0",
                    sgd->dampening()));
  }
  auto state = std::make_unique<torch::optim::SGDParamState>();
  state->momentum_buffer(at::zeros_like(shard));
  return state;
}

// Gives `visit` the state in its own type, where LibTorch counts updates in it.
template <class Visit>
void visit_steps(torch::optim::OptimizerParamState* state, const Visit& visit) {
  if (auto* adam = dynamic_cast<torch::optim::AdamParamState*>(state)) visit(*adam);
  if (auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(state)) visit(*adamw);
  if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(state)) visit(*rmsprop);
  if (auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(state)) visit(*adagrad);
}

}  // namespace

ShardTensorOptimizer::ShardTensorOptimizer(EngineCore& core, TorchOptimizer options)
    : ShardedOptimizer(core), options_(std::move(options)), shard_of_(core.model.parameters.size(), -1) {
  if (!options_.make) throw InvalidArgument("TorchOptimizer: expected a `make` function, got none");
  for (std::size_t i = 0; i < core.model.parameters.size(); ++i) {
    const ShardedParameter& p = core.model.parameters[i];
    if (p.trainable_index < 0) continue;
    const FlatGroup& group = core.model.group_of(p);
    if (group.master_dtype != group.gradient_dtype()) {
      throw InvalidArgument(
          fmt::format("TorchOptimizer: parameter {} is {}, its gradient fp32; leave the parameter fp32 "
                      "and set ShardOptions::precision.param, or use fsdp::AdamW",
                      p.name, name_of(group.master_dtype)));
    }
    const std::size_t offset = bytes_of(p.piece.shard_offset, group.master_dtype);
    shard_of_[i] = static_cast<int>(shards_.size());
    parameters_.push_back(i);
    shards_.push_back({p.name, flat_view(core.master_shard(group) + offset, p.piece.numel(), group.master_dtype)});
    gradients_.push_back(flat_view(core.gradient_shard(group) + offset, p.piece.numel(), group.master_dtype));
  }
  optimizer_ = options_.make(shards_);
  if (optimizer_ == nullptr) throw InvalidArgument("TorchOptimizer: `make` returned a null pointer");
  if (dynamic_cast<torch::optim::LBFGS*>(optimizer_.get()) != nullptr) {
    throw InvalidArgument(
        "TorchOptimizer: LBFGS looks at all elements together, and a shard has some of them only; use "
        "an element-wise optimizer, or fsdp::Muon for whole matrices");
  }
  for (auto& group : optimizer_->param_groups()) group_lrs_.push_back(group.options().get_lr());
  lr_ = group_lrs_.empty() ? 0 : *std::max_element(group_lrs_.begin(), group_lrs_.end());
  made_lr_ = lr_;
  steps_.resize(shards_.size());
  make_states();
}

void ShardTensorOptimizer::make_states() {
  for (auto& group : optimizer_->param_groups()) {
    for (const at::Tensor& shard : group.params()) {
      auto& slot = optimizer_->state()[shard.unsafeGetTensorImpl()];
      if (slot == nullptr) slot = make_state(shard, group.options());
      if (slot == nullptr) optimizer_->state().erase(shard.unsafeGetTensorImpl());
    }
  }
}

void ShardTensorOptimizer::prepare(std::span<const int>, const std::vector<bool>& used, const StepSettings& settings) {
  const at::NoGradGuard no_grad;
  for (std::size_t s = 0; s < shards_.size(); ++s) {
    at::Tensor& grad = shards_[s].tensor.mutable_grad();
    grad.reset();
    if (!used[parameters_[s]]) continue;
    ++steps_[s];
    grad = gradients_[s];
    if (settings.gradient.scale != 1) grad.mul_(settings.gradient.scale);
    if (std::isfinite(settings.gradient.limit)) grad.clamp_(-settings.gradient.limit, settings.gradient.limit);
  }
  auto& groups = optimizer_->param_groups();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const double relative = made_lr_ != 0 ? group_lrs_[g] / made_lr_ : 1;
    groups[g].options().set_lr(lr_ * relative * settings.lr_factor);
  }
  optimizer_->step();
  for (ParameterShard& shard : shards_) shard.tensor.mutable_grad().reset();
}

void ShardTensorOptimizer::update_run(std::size_t parameter, std::int64_t begin, std::int64_t numel) {
  const ShardedParameter& p = core_.model.parameters[parameter];
  const FlatGroup& group = core_.model.group_of(p);
  if (!group.has_master()) return;
  const std::int64_t offset = p.piece.shard_offset + begin;
  cast_elements(core_.parameter_shard(group) + bytes_of(offset, group.dtype), group.dtype,
                core_.master_shard(group) + bytes_of(offset, group.master_dtype), group.master_dtype, numel);
}

// The other numbers are in options whose fields each LibTorch optimizer names by itself: they stay as the user made them.
void ShardTensorOptimizer::visit_settings(const SettingVisitor& visit) {
  double lr = lr_;
  visit("TorchOptimizer.lr", lr);
  set_lr(lr);
}

// Their values are not seen here, but their class, groups and rates are.
void ShardTensorOptimizer::describe_rest(std::vector<std::string>& lines) const {
  const torch::optim::Optimizer& optimizer = *optimizer_;
  lines.push_back("TorchOptimizer is a " + c10::demangle(typeid(optimizer).name()));
  for (std::size_t g = 0; g < group_lrs_.size(); ++g) {
    lines.push_back(fmt::format("TorchOptimizer group {} has {} parameters, lr {}", g,
                                optimizer_->param_groups()[g].params().size(), group_lrs_[g]));
  }
}

void ShardTensorOptimizer::set_lr(double lr) {
  require_option(is_non_negative(lr), "lr", lr, "at least 0");
  lr_ = lr;
}

ShardTensorOptimizer::StateTensors ShardTensorOptimizer::states_of(std::size_t shard) const {
  if (options_.state) return options_.state(*optimizer_, shards_[shard]);
  StateTensors tensors;
  const auto add = [&](const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) tensors.emplace_back(name, tensor);
  };
  const auto found = optimizer_->state().find(shards_[shard].tensor.unsafeGetTensorImpl());
  auto* state = found != optimizer_->state().end() ? found->second.get() : nullptr;
  const auto add_adam = [&](const auto* adam) {
    add("exp_avg", adam->exp_avg());
    add("exp_avg_sq", adam->exp_avg_sq());
    add("max_exp_avg_sq", adam->max_exp_avg_sq());
  };
  if (const auto* adam = dynamic_cast<torch::optim::AdamParamState*>(state)) {
    add_adam(adam);
  } else if (const auto* adamw = dynamic_cast<torch::optim::AdamWParamState*>(state)) {
    add_adam(adamw);
  } else if (const auto* sgd = dynamic_cast<torch::optim::SGDParamState*>(state)) {
    add("momentum_buffer", sgd->momentum_buffer());
  } else if (const auto* rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(state)) {
    add("square_avg", rmsprop->square_avg());
    add("momentum_buffer", rmsprop->momentum_buffer());
    add("grad_avg", rmsprop->grad_avg());
  } else if (const auto* adagrad = dynamic_cast<torch::optim::AdagradParamState*>(state)) {
    add("sum", adagrad->sum());
  }
  return tensors;
}

std::size_t ShardTensorOptimizer::state_bytes() const {
  std::size_t bytes = 0;
  for (std::size_t s = 0; s < shards_.size() && states_are_known(); ++s) {
    for (const auto& [name, tensor] : states_of(s)) bytes += tensor.nbytes();
  }
  return bytes;
}

std::size_t ShardTensorOptimizer::unsharded_state_bytes() const {
  std::size_t bytes = 0;
  for (std::size_t s = 0; s < shards_.size() && states_are_known(); ++s) {
    const std::int64_t numel = core_.model.parameters[parameters_[s]].tensor.numel();
    for (const auto& [name, tensor] : states_of(s)) bytes += static_cast<std::size_t>(numel) * tensor.element_size();
  }
  return bytes;
}

bool ShardTensorOptimizer::states_are_known() const {
  const auto is = [this]<class T>(std::type_identity<T>) { return dynamic_cast<T*>(optimizer_.get()) != nullptr; };
  return options_.state || is(std::type_identity<torch::optim::Adam>()) ||
         is(std::type_identity<torch::optim::AdamW>()) || is(std::type_identity<torch::optim::SGD>()) ||
         is(std::type_identity<torch::optim::RMSprop>()) || is(std::type_identity<torch::optim::Adagrad>());
}

void ShardTensorOptimizer::append_views(std::vector<ShardView>& views) const {
  if (!states_are_known()) {
    throw InvalidArgument(
        "TorchOptimizer: the state of an optimizer that is not LibTorch's own is unknown; set "
        "TorchOptimizer::state, which lists it, to save or resume");
  }
  for (std::size_t s = 0; s < shards_.size(); ++s) {
    const ShardedParameter& p = core_.model.parameters[parameters_[s]];
    for (const auto& [name, tensor] : states_of(s)) {
      if (tensor.numel() != p.piece.numel() || !tensor.is_contiguous()) {
        throw InvalidArgument(
            fmt::format("TorchOptimizer: state {} of parameter {}: expected {} contiguous elements as "
                        "the shard has, got {}",
                        name, p.name, p.piece.numel(), tensor.numel()));
      }
      views.push_back(view_of_piece(core_, p, ShardKind::kOptimizer, to_dtype(tensor.scalar_type()), name + ".",
                                    static_cast<std::byte*>(tensor.mutable_data_ptr())));
    }
  }
}

std::int64_t ShardTensorOptimizer::steps_of(std::size_t parameter) const {
  return steps_[static_cast<std::size_t>(shard_of_[parameter])];
}

void ShardTensorOptimizer::set_steps_of(std::size_t parameter, std::int64_t steps) {
  const auto index = static_cast<std::size_t>(shard_of_[parameter]);
  const ParameterShard& shard = shards_[index];
  steps_[index] = steps;
  const auto found = optimizer_->state().find(shard.tensor.unsafeGetTensorImpl());
  if (found != optimizer_->state().end()) visit_steps(found->second.get(), [&](auto& state) { state.step(steps); });
}

}  // namespace fsdp
