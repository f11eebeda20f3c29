#include "sharding/sharded_optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

void require(bool holds, std::string_view field, double found, std::string_view expected) {
  if (!holds) throw InvalidArgument(fmt::format("optimizer: expected {} {}, got {}", field, expected, found));
}

bool is_non_negative(double value) { return std::isfinite(value) && value >= 0; }

template <class Options>
void validate_adam(const Options& options) {
  require(is_non_negative(options.lr), "lr", options.lr, "at least 0");
  for (const double beta : options.betas) require(beta >= 0 && beta < 1, "betas", beta, "in [0, 1)");
  require(is_non_negative(options.eps), "eps", options.eps, "at least 0");
  require(is_non_negative(options.weight_decay), "weight_decay", options.weight_decay, "at least 0");
}

void validate(const AdamW& options) { validate_adam(options); }
void validate(const Adam& options) { validate_adam(options); }

void validate(const SGD& options) {
  require(is_non_negative(options.lr), "lr", options.lr, "at least 0");
  require(is_non_negative(options.momentum), "momentum", options.momentum, "at least 0");
  require(is_non_negative(options.weight_decay), "weight_decay", options.weight_decay, "at least 0");
  require(!options.nesterov || options.momentum > 0, "momentum", options.momentum, "above 0 with nesterov");
}

std::vector<std::string> state_names_of(const OptimizerOptions& options) {
  const auto* sgd = std::get_if<SGD>(&options);
  if (sgd == nullptr) return {"exp_avg", "exp_avg_sq"};
  return sgd->momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
}

}  // namespace

ShardedOptimizer::ShardedOptimizer(EngineCore& core, OptimizerOptions options)
    : core_(core),
      options_(std::move(options)),
      settings_(core.model.parameters.size()),
      steps_(core.model.parameters.size()) {
  std::visit(
      [this](const auto& chosen) {
        validate(chosen);
        lr_ = chosen.lr;
        resolve_settings(chosen.weight_decay, chosen.groups);
      },
      options_);
  for (std::size_t i = 0; i < state_names_of(options_).size(); ++i)
    states_.push_back(zeroed_bytes(core.model.state_bytes));
}

void ShardedOptimizer::resolve_settings(double weight_decay, const ParameterGroups& groups) {
  for (std::size_t i = 0; i < settings_.size(); ++i) {
    const ShardedParameter& p = core_.model.parameters[i];
    settings_[i].weight_decay = weight_decay;
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const ParameterGroup& candidate) {
      return candidate.matches && candidate.matches(p.name, p.tensor.dim());
    });
    if (group == groups.end()) continue;
    require(is_non_negative(group->lr_scale), "lr_scale", group->lr_scale, "at least 0");
    settings_[i].lr_scale = group->lr_scale;
    if (group->weight_decay) {
      require(is_non_negative(*group->weight_decay), "weight_decay of a group", *group->weight_decay, "at least 0");
      settings_[i].weight_decay = *group->weight_decay;
    }
  }
}

ShardedOptimizer::Norm ShardedOptimizer::gradient_norm(const std::vector<bool>& used, double p_norm) const {
  struct Part {
    double norm = 0;
    std::int64_t first_bad = std::numeric_limits<std::int64_t>::max();
  };
  Part own;
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) continue;
    const ShardedParameter& p = core_.model.parameters[i];
    const FlatGroup& group = core_.model.group_of(p);
    const DType dtype = group.gradient_dtype();
    // The owners of a share hold the same gradients: each counts its own part.
    const Mesh& mesh = core_.model.unit_of(group).mesh;
    const ElementRange part = mesh.part_of_share(group.layout->shard_numel(), mesh.replica());
    const std::int64_t begin = std::max(p.piece.shard_offset, part.offset),
                       end = std::min(p.piece.shard_offset + p.piece.numel(), part.offset + part.numel);
    if (begin >= end) continue;
    const double norm = norm_part(core_.gradient_shard(group) + bytes_of(begin, dtype), end - begin, dtype, p_norm);
    if (!std::isfinite(norm)) own.first_bad = std::min(own.first_bad, static_cast<std::int64_t>(i));
    own.norm = combine_norm_parts(own.norm, norm, p_norm);
  }
  std::vector<Part> all(static_cast<std::size_t>(core_.context.world_size()));
  core_.communicator().all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  // Combined in rank order on every rank: the same bits everywhere.
  Part total;
  for (const Part& part : all) {
    total.norm = combine_norm_parts(total.norm, part.norm, p_norm);
    total.first_bad = std::min(total.first_bad, part.first_bad);
  }
  const bool bad = total.first_bad != Part{}.first_bad;
  return {norm_of(total.norm, p_norm), bad ? static_cast<int>(total.first_bad) : -1};
}

OptimizerSpan ShardedOptimizer::span_of(const ShardedParameter& p) const {
  const FlatGroup& group = core_.model.group_of(p);
  const std::int64_t offset = p.piece.shard_offset;
  const std::size_t state_offset = bytes_of(offset, group.gradient_dtype());
  return {.dtype = group.master_dtype,
          .parameter = core_.master_shard(group) + bytes_of(offset, group.master_dtype),
          .gradient = core_.gradient_shard(group) + state_offset,
          .first = states_.size() > 0 ? state(0, group) + state_offset : nullptr,
          .second = states_.size() > 1 ? state(1, group) + state_offset : nullptr,
          .numel = p.piece.numel(),
          .rounded = group.has_master() ? core_.parameter_shard(group) + bytes_of(offset, group.dtype) : nullptr,
          .rounded_dtype = group.dtype};
}

void ShardedOptimizer::update(const std::vector<bool>& used, const GradientUse& gradient) {
  const auto adam = [](const auto& options, double lr, double weight_decay, bool decoupled) {
    return AdamUpdate{.lr = lr,
                      .beta1 = options.betas[0],
                      .beta2 = options.betas[1],
                      .eps = options.eps,
                      .weight_decay = weight_decay,
                      .decoupled = decoupled};
  };
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) continue;
    const OptimizerSpan span = span_of(core_.model.parameters[i]);
    const double lr = lr_ * settings_[i].lr_scale, weight_decay = settings_[i].weight_decay;
    const std::int64_t step = ++steps_[i];
    if (const auto* sgd = std::get_if<SGD>(&options_)) {
      sgd_update(span, {.lr = lr,
                        .momentum = sgd->momentum,
                        .weight_decay = weight_decay,
                        .nesterov = sgd->nesterov,
                        .gradient = gradient,
                        .step = step});
      continue;
    }
    const auto* adamw = std::get_if<AdamW>(&options_);
    AdamUpdate update = adamw != nullptr ? adam(*adamw, lr, weight_decay, /*decoupled=*/true)
                                         : adam(std::get<Adam>(options_), lr, weight_decay, /*decoupled=*/false);
    update.gradient = gradient;
    update.step = step;
    adam_update(span, update);
  }
}

void ShardedOptimizer::set_lr(double lr) {
  require(is_non_negative(lr), "lr", lr, "at least 0");
  lr_ = lr;
}

std::size_t ShardedOptimizer::state_bytes() const { return states_.size() * core_.model.state_bytes; }

std::vector<std::string> ShardedOptimizer::state_names() const { return state_names_of(options_); }

std::byte* ShardedOptimizer::state(std::size_t which, const FlatGroup& group) const {
  return static_cast<std::byte*>(states_[which].mutable_data_ptr()) + group.state_offset;
}

}  // namespace fsdp
