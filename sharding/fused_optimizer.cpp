#include "sharding/fused_optimizer.h"

#include <algorithm>

#include <fmt/format.h>

namespace fsdp {
namespace {

template <class Options>
void validate_adam(const Options& options) {
  require_option(is_non_negative(options.lr), "lr", options.lr, "at least 0");
  for (const double beta : options.betas) require_option(beta >= 0 && beta < 1, "betas", beta, "in [0, 1)");
  require_option(is_non_negative(options.eps), "eps", options.eps, "at least 0");
  require_option(is_non_negative(options.weight_decay), "weight_decay", options.weight_decay, "at least 0");
}

void validate(const AdamW& options) { validate_adam(options); }
void validate(const Adam& options) { validate_adam(options); }

void validate(const SGD& options) {
  require_option(is_non_negative(options.lr), "lr", options.lr, "at least 0");
  require_option(is_non_negative(options.momentum), "momentum", options.momentum, "at least 0");
  require_option(is_non_negative(options.weight_decay), "weight_decay", options.weight_decay, "at least 0");
  require_option(!options.nesterov || options.momentum > 0, "momentum", options.momentum, "above 0 with nesterov");
}

std::vector<std::string> state_names(const FusedOptimizer::Options& options) {
  const auto* sgd = std::get_if<SGD>(&options);
  if (sgd == nullptr) return {"exp_avg", "exp_avg_sq"};
  return sgd->momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
}

}  // namespace

FusedOptimizer::FusedOptimizer(EngineCore& core, Options options,
                               const std::function<bool(const ShardedParameter&)>& covers)
    : ShardedOptimizer(core), options_(std::move(options)), slots_(core.model.parameters.size()) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const ShardedParameter& p = core.model.parameters[i];
    slots_[i].covered = p.trainable_index >= 0 && (!covers || covers(p));
    slots_[i].state_offset = bytes;
    if (!slots_[i].covered) continue;
    const std::size_t piece = bytes_of(p.piece.numel(), core.model.group_of(p).gradient_dtype());
    bytes += (piece + kParameterAlignmentBytes - 1) / kParameterAlignmentBytes * kParameterAlignmentBytes;
  }
  apply_options();
  lr_ = std::visit([](const auto& chosen) { return chosen.lr; }, options_);
  for (std::size_t i = 0; i < state_names(options_).size(); ++i) states_.push_back(zeroed_bytes(bytes));
}

void FusedOptimizer::apply_options() {
  std::visit(
      [this](const auto& chosen) {
        validate(chosen);
        resolve_groups(chosen.weight_decay, chosen.groups);
      },
      options_);
}

void FusedOptimizer::visit_settings(const SettingVisitor& visit) {
  const auto visit_adam = [&](const std::string& kind, auto& adam) {
    visit(kind + "beta1", adam.betas[0]);
    visit(kind + "beta2", adam.betas[1]);
    visit(kind + "eps", adam.eps);
    visit(kind + "weight_decay", adam.weight_decay);
  };
  std::string kind = "SGD.";
  if (auto* adamw = std::get_if<AdamW>(&options_)) {
    visit_adam(kind = "AdamW.", *adamw);
  } else if (auto* adam = std::get_if<Adam>(&options_)) {
    visit_adam(kind = "Adam.", *adam);
  } else if (auto* sgd = std::get_if<SGD>(&options_)) {
    visit(kind + "momentum", sgd->momentum);
    visit(kind + "weight_decay", sgd->weight_decay);
  }
  apply_options();
  double lr = lr_;
  visit(kind + "lr", lr);
  set_lr(lr);
}

void FusedOptimizer::describe_rest(std::vector<std::string>& lines) const {
  if (const auto* sgd = std::get_if<SGD>(&options_)) lines.push_back(fmt::format("SGD.nesterov {}", sgd->nesterov));
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].covered) continue;
    lines.push_back(fmt::format("for {} lr_scale {}, weight_decay {}", core_.model.parameters[i].name,
                                slots_[i].lr_scale, slots_[i].weight_decay));
  }
}

void FusedOptimizer::resolve_groups(double weight_decay, const ParameterGroups& groups) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const ShardedParameter& p = core_.model.parameters[i];
    slots_[i].weight_decay = weight_decay;
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const ParameterGroup& candidate) {
      return candidate.matches && candidate.matches(p.name, p.tensor.dim());
    });
    if (group == groups.end()) continue;
    require_option(is_non_negative(group->lr_scale), "lr_scale", group->lr_scale, "at least 0");
    slots_[i].lr_scale = group->lr_scale;
    if (group->weight_decay) {
      require_option(is_non_negative(*group->weight_decay), "weight_decay of a group", *group->weight_decay,
                     "at least 0");
      slots_[i].weight_decay = *group->weight_decay;
    }
  }
}

void FusedOptimizer::prepare(std::span<const int> parameters, const std::vector<bool>& used,
                             const StepSettings& settings) {
  settings_ = settings;
  for (const int index : parameters) {
    const auto i = static_cast<std::size_t>(index);
    slots_[i].steps += used[i] && slots_[i].covered;
  }
}

void FusedOptimizer::update_run(std::size_t parameter, std::int64_t begin, std::int64_t numel) {
  const ShardedParameter& p = core_.model.parameters[parameter];
  const FlatGroup& group = core_.model.group_of(p);
  const std::int64_t offset = p.piece.shard_offset + begin;
  const std::size_t state_offset = bytes_of(begin, group.gradient_dtype());
  const OptimizerSpan span{
      .dtype = group.master_dtype,
      .parameter = core_.master_shard(group) + bytes_of(offset, group.master_dtype),
      .gradient = core_.gradient_shard(group) + bytes_of(offset, group.gradient_dtype()),
      .first = states_.size() > 0 ? state(0, parameter) + state_offset : nullptr,
      .second = states_.size() > 1 ? state(1, parameter) + state_offset : nullptr,
      .numel = numel,
      .rounded = group.has_master() ? core_.parameter_shard(group) + bytes_of(offset, group.dtype) : nullptr,
      .rounded_dtype = group.dtype};
  const Slot& slot = slots_[parameter];
  const double lr = lr_ * settings_.lr_factor * slot.lr_scale;
  if (const auto* sgd = std::get_if<SGD>(&options_)) {
    sgd_update(span, {.lr = lr,
                      .momentum = sgd->momentum,
                      .weight_decay = slot.weight_decay,
                      .nesterov = sgd->nesterov,
                      .gradient = settings_.gradient,
                      .step = slot.steps});
    return;
  }
  const auto* adamw = std::get_if<AdamW>(&options_);
  const auto* adam = std::get_if<Adam>(&options_);
  const std::array<double, 2>& betas = adamw != nullptr ? adamw->betas : adam->betas;
  adam_update(span, {.lr = lr,
                     .beta1 = betas[0],
                     .beta2 = betas[1],
                     .eps = adamw != nullptr ? adamw->eps : adam->eps,
                     .weight_decay = slot.weight_decay,
                     .decoupled = adamw != nullptr,
                     .gradient = settings_.gradient,
                     .step = slot.steps});
}

void FusedOptimizer::set_lr(double lr) {
  require_option(is_non_negative(lr), "lr", lr, "at least 0");
  lr_ = lr;
}

std::size_t FusedOptimizer::state_bytes() const {
  std::size_t bytes = 0;
  for (const at::Tensor& state : states_) bytes += state.nbytes();
  return bytes;
}

std::size_t FusedOptimizer::unsharded_state_bytes() const {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const ShardedParameter& p = core_.model.parameters[i];
    if (slots_[i].covered) bytes += bytes_of(p.tensor.numel(), core_.model.group_of(p).gradient_dtype());
  }
  return bytes * states_.size();
}

void FusedOptimizer::append_views(std::vector<ShardView>& views) const {
  const std::vector<std::string> names = state_names(options_);
  for (std::size_t which = 0; which < names.size(); ++which) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].covered) continue;
      const ShardedParameter& p = core_.model.parameters[i];
      views.push_back(view_of_piece(core_, p, ShardKind::kOptimizer, core_.model.group_of(p).gradient_dtype(),
                                    names[which] + ".", state(which, i)));
    }
  }
}

std::byte* FusedOptimizer::state(std::size_t which, std::size_t parameter) const {
  return static_cast<std::byte*>(states_[which].mutable_data_ptr()) + slots_[parameter].state_offset;
}

}  // namespace fsdp
