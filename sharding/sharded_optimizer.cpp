#include "sharding/sharded_optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/optimizer_kernels.h"

namespace fsdp {
namespace {

void require(bool holds, std::string_view field, double found, std::string_view expected) {
  if (!holds) throw InvalidArgument(fmt::format("optimizer: expected {} {}, got {}", field, expected, found));
}

bool is_non_negative(double value) { return std::isfinite(value) && value >= 0; }

void validate(const AdamW& options) {
  require(is_non_negative(options.lr), "lr", options.lr, "at least 0");
  for (const double beta : options.betas) require(beta >= 0 && beta < 1, "betas", beta, "in [0, 1)");
  require(is_non_negative(options.eps), "eps", options.eps, "at least 0");
  require(is_non_negative(options.weight_decay), "weight_decay", options.weight_decay, "at least 0");
}

void validate(const SGD& options) {
  require(is_non_negative(options.lr), "lr", options.lr, "at least 0");
  require(is_non_negative(options.momentum), "momentum", options.momentum, "at least 0");
  require(is_non_negative(options.weight_decay), "weight_decay", options.weight_decay, "at least 0");
  require(!options.nesterov || options.momentum > 0, "momentum", options.momentum, "above 0 with nesterov");
}

std::vector<std::string> state_names_of(const OptimizerOptions& options) {
  if (std::holds_alternative<AdamW>(options)) return {"exp_avg", "exp_avg_sq"};
  return std::get<SGD>(options).momentum != 0 ? std::vector<std::string>{"momentum_buffer"}
                                              : std::vector<std::string>{};
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
    states_.push_back(zeroed_bytes(core.model.state_shard_bytes));
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

ShardedOptimizer::Norm ShardedOptimizer::gradient_norm(const std::vector<bool>& used) const {
  struct Part {
    double sum_of_squares;
    std::int64_t first_bad;
  };
  Part own{0, static_cast<std::int64_t>(used.size())};
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) continue;
    const ShardedParameter& p = core_.model.parameters[i];
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(p.group)];
    const DType dtype = state_dtype(group.dtype);
    // The owners of a share hold the same gradients: each counts its own part.
    const ElementRange part = core_.mesh.part_of_share(group.layout->shard_numel(), core_.mesh.replica());
    const std::int64_t begin = std::max(p.piece.shard_offset, part.offset),
                       end = std::min(p.piece.shard_offset + p.piece.numel(), part.offset + part.numel);
    if (begin >= end) continue;
    const double squares = fsdp::sum_of_squares(
        core_.gradient_shard(group) + static_cast<std::size_t>(begin) * size_of(dtype), end - begin, dtype);
    if (!std::isfinite(squares)) own.first_bad = std::min(own.first_bad, static_cast<std::int64_t>(i));
    own.sum_of_squares += squares;
  }
  std::vector<Part> all(static_cast<std::size_t>(core_.context.world_size()));
  core_.communicator().all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  // Added in rank order on every rank: the same bits everywhere.
  Part total{0, static_cast<std::int64_t>(used.size())};
  for (const Part& part : all) {
    total.sum_of_squares += part.sum_of_squares;
    total.first_bad = std::min(total.first_bad, part.first_bad);
  }
  const bool bad = total.first_bad < static_cast<std::int64_t>(used.size());
  return {std::sqrt(total.sum_of_squares), bad ? static_cast<int>(total.first_bad) : -1};
}

void ShardedOptimizer::update(const std::vector<bool>& used, double gradient_scale) {
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) continue;
    ++steps_[i];
    const ShardedParameter& p = core_.model.parameters[i];
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(p.group)];
    const std::size_t state_bytes = static_cast<std::size_t>(p.piece.shard_offset) * size_of(state_dtype(group.dtype));
    const OptimizerSpan span{.dtype = group.dtype,
                             .parameter = core_.parameter_shard(group) +
                                          static_cast<std::size_t>(p.piece.shard_offset) * size_of(group.dtype),
                             .gradient = core_.gradient_shard(group) + state_bytes,
                             .first = states_.size() > 0 ? state(0, group) + state_bytes : nullptr,
                             .second = states_.size() > 1 ? state(1, group) + state_bytes : nullptr,
                             .numel = p.piece.numel()};
    const double lr = lr_ * settings_[i].lr_scale;
    if (const auto* adamw = std::get_if<AdamW>(&options_)) {
      adamw_update(span, {.lr = lr,
                          .beta1 = adamw->betas[0],
                          .beta2 = adamw->betas[1],
                          .eps = adamw->eps,
                          .weight_decay = settings_[i].weight_decay,
                          .gradient_scale = gradient_scale,
                          .step = steps_[i]});
    } else {
      const auto& sgd = std::get<SGD>(options_);
      sgd_update(span, {.lr = lr,
                        .momentum = sgd.momentum,
                        .weight_decay = settings_[i].weight_decay,
                        .gradient_scale = gradient_scale,
                        .nesterov = sgd.nesterov,
                        .step = steps_[i]});
    }
  }
}

void ShardedOptimizer::set_lr(double lr) {
  require(is_non_negative(lr), "lr", lr, "at least 0");
  lr_ = lr;
}

std::size_t ShardedOptimizer::state_bytes() const { return states_.size() * core_.model.state_shard_bytes; }

std::vector<std::string> ShardedOptimizer::state_names() const { return state_names_of(options_); }

std::byte* ShardedOptimizer::state(std::size_t which, const FlatGroup& group) const {
  return static_cast<std::byte*>(states_[which].mutable_data_ptr()) + group.state_offset;
}

}  // namespace fsdp
