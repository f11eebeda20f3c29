#include "sharding/sharded_optimizer.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/fused_optimizer.h"
#include "sharding/muon_optimizer.h"
#include "sharding/shard_tensor_optimizer.h"

namespace fsdp {

void ShardedOptimizer::step(std::span<const int> parameters, const std::vector<bool>& used,
                            const StepSettings& settings, WeightAverage* average) {
  // What the update leaves in the second-level cache, the average finds there.
  constexpr std::int64_t kRunNumel = 32768;
  prepare(parameters, used, settings);
  for (const int index : parameters) {
    const auto i = static_cast<std::size_t>(index);
    const ShardedParameter& p = core_.model.parameters[i];
    if (p.trainable_index < 0 || (!used[i] && average == nullptr)) continue;
    for (std::int64_t begin = 0; begin < p.piece.numel(); begin += kRunNumel) {
      const std::int64_t numel = std::min(kRunNumel, p.piece.numel() - begin);
      if (used[i]) update_run(i, begin, numel);
      if (average != nullptr) average->update(p, begin, numel);
    }
  }
}

std::vector<std::string> ShardedOptimizer::description() {
  std::vector<std::string> lines;
  visit_settings([&](const std::string& name, double& value) { lines.push_back(fmt::format("{} {}", name, value)); });
  describe_rest(lines);
  return lines;
}

std::unique_ptr<ShardedOptimizer> make_sharded_optimizer(EngineCore& core, OptimizerOptions options) {
  if (core.update_in_backward &&
      (std::holds_alternative<TorchOptimizer>(options) || std::holds_alternative<Muon>(options))) {
    throw InvalidArgument(
        fmt::format("Engine::optimizer: {} with ShardOptions::update_in_backward: its update is one of "
                    "the whole model; choose AdamW, Adam or SGD, or leave update_in_backward off",
                    std::holds_alternative<Muon>(options) ? "Muon" : "a torch::optim optimizer"));
  }
  if (auto* torch = std::get_if<TorchOptimizer>(&options))
    return std::make_unique<ShardTensorOptimizer>(core, std::move(*torch));
  if (auto* muon = std::get_if<Muon>(&options)) return std::make_unique<MuonOptimizer>(core, std::move(*muon));
  if (auto* adamw = std::get_if<AdamW>(&options)) return std::make_unique<FusedOptimizer>(core, std::move(*adamw));
  if (auto* adam = std::get_if<Adam>(&options)) return std::make_unique<FusedOptimizer>(core, std::move(*adam));
  return std::make_unique<FusedOptimizer>(core, std::get<SGD>(std::move(options)));
}

void require_option(bool holds, std::string_view field, double found, std::string_view expected) {
  if (!holds) throw InvalidArgument(fmt::format("optimizer: expected {} {}, got {}", field, expected, found));
}

bool is_non_negative(double value) { return std::isfinite(value) && value >= 0; }

ShardView view_of_piece(const EngineCore& core, const ShardedParameter& p, ShardKind kind, DType dtype,
                        std::string prefix, std::byte* data) {
  return {.name = std::move(prefix) + p.name,
          .kind = kind,
          .dtype = dtype,
          .shape = p.sizes,
          .strides = p.strides,
          .begin = p.piece.begin,
          .end = p.piece.end,
          .data = data,
          .replica = core.unit(p.unit).mesh.replica()};
}

}  // namespace fsdp
