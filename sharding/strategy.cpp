#include "sharding/strategy.h"

#include <fmt/format.h>

#include <fsdp/error.h>

#include "memory/torch_compat.h"

namespace fsdp {
namespace {

[[noreturn]] void refuse(const std::string& unit, const std::string& text) {
  throw InvalidArgument(fmt::format("fsdp::shard: unit {}: {}", unit, text));
}

DType precision_of(c10::ScalarType type, std::string_view field, const std::string& unit) {
  if (type != c10::ScalarType::Float && type != c10::ScalarType::BFloat16 && type != c10::ScalarType::Half) {
    refuse(unit,
           fmt::format("expected precision.{} to be Float, BFloat16 or Half, got {}", field, c10::toString(type)));
  }
  return to_dtype(type);
}

// What a whole model is asked for, and this unit's strategy cannot give.
void check_model_options(const ShardOptions& model, const UnitPolicy& policy, const std::string& unit) {
  const auto refuse_strategy = [&](std::string_view option, std::string_view reason) {
    refuse(unit, fmt::format("{} with strategy {}, {}; choose kShardGradients or kFullShard", option,
                             name_of(policy.strategy), reason));
  };
  if (!policy.keeps_gradients) return;
  if (model.ordered_sums)
    refuse_strategy("ordered_sums", "which adds up a rank's micro-batches before it adds up ranks");
  if (model.update_in_backward) refuse_strategy("update_in_backward", "which keeps whole gradients for the step");
}

UnitPolicy resolve(const UnitOptions& options, const std::string& unit, int world_size) {
  const int group = options.shard_group;
  if (group < 0 || (group != 0 && world_size % group != 0)) {
    refuse(unit,
           fmt::format("expected shard_group to divide the {} ranks, or 0 for all of them, got {}", world_size, group));
  }
  UnitPolicy policy{
      .strategy = options.strategy,
      .shares = group != 0 ? group : world_size,
      .keeps_parameters = options.strategy != Strategy::kFullShard,
      .keeps_gradients = options.strategy == Strategy::kReplicate || options.strategy == Strategy::kShardOptimizer,
      .param = precision_of(options.precision.param, "param", unit),
      .reduce = precision_of(options.precision.reduce, "reduce", unit)};
  if (options.strategy == Strategy::kReplicate) {
    if (group > 1) {
      refuse(unit, fmt::format("shard_group {} with strategy kReplicate, which shares nothing; leave shard_group 0, or "
                               "choose kShardOptimizer",
                               group));
    }
    policy.shares = 1;
  }
  if (policy.keeps_gradients && policy.reduce != DType::kFloat32) {
    refuse(unit, fmt::format("precision.reduce {} with strategy {}, whose gradients accumulate in fp32 and travel so; "
                             "leave precision.reduce Float, or choose kShardGradients or kFullShard",
                             c10::toString(options.precision.reduce), name_of(options.strategy)));
  }
  return policy;
}

}  // namespace

std::string_view name_of(Strategy strategy) {
  switch (strategy) {
    case Strategy::kReplicate: return "kReplicate";
    case Strategy::kShardOptimizer: return "kShardOptimizer";
    case Strategy::kShardGradients: return "kShardGradients";
    case Strategy::kFullShard: return "kFullShard";
  }
  return "?";
}

std::vector<UnitPolicy> resolve_policies(const std::vector<CutUnit>& units, const ShardOptions& options,
                                         int world_size) {
  if (const auto& output = options.precision.output; output && !c10::isFloatingType(*output)) {
    throw InvalidArgument(fmt::format("fsdp::shard: expected precision.output to be a floating-point type, got {}",
                                      c10::toString(*output)));
  }
  if (options.ordered_sums && options.update_in_backward) {
    throw InvalidArgument(
        "fsdp::shard: ordered_sums with update_in_backward: the one divides by the samples of a whole step, the other "
        "updates before it is over; choose one");
  }
  std::vector<UnitPolicy> policies;
  for (const CutUnit& unit : units) {
    std::optional<UnitOptions> own;
    if (options.per_unit) own = options.per_unit(unit.name);
    if (own && own->precision.output && own->precision.output != options.precision.output) {
      refuse(unit.name,
             "precision.output of one unit: results leave the whole model only; set ShardOptions::precision.output");
    }
    policies.push_back(resolve(own.value_or(UnitOptions{options.strategy, options.shard_group, options.precision}),
                               unit.name, world_size));
    check_model_options(options, policies.back(), unit.name);
    policies.back().keeps_gradient_shares = !options.update_in_backward || policies.back().shares != world_size;
  }
  return policies;
}

}  // namespace fsdp
