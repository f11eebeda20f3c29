// How a model is cut into units and run. Plain aggregates with defaults.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

namespace torch::nn {
class Module;
}

namespace fsdp {

// What each rank holds of a unit from one step to the next; "share" is 1/S of it, S = shard_group.
//
//                     parameters    gradients    optimizer state   reduced                    known elsewhere as
//   kReplicate        whole         whole        whole             once a step                DDP
//   kShardOptimizer   whole         whole        share             once a step                ZeRO-1
//   kShardGradients   whole         share        share             after each backward        ZeRO-2, keep after forward
//   kFullShard        share         share        share             after each backward        ZeRO-3
//
// Whole parameters are gathered once a step, at their first use, into memory that is theirs alone; gradients that are
// reduced once accumulate locally in fp32 (fp64 for fp64) and are reduced in the step's last backward once a step has
// shown which that is, else in Optimizer::step.
enum class Strategy { kReplicate, kShardOptimizer, kShardGradients, kFullShard };

// The types that fp32 parameters are computed in. Parameters of other types, and buffers, stay as they are.
struct MixedPrecision {
  // torch::kFloat, kBFloat16 or kHalf. A 16-bit type makes the module's fp32 parameters tensors of that type:
  // activations have to be, too (Engine::forward casts the input), and gradients come in it. Each rank keeps an fp32 master of
  // its share, which the optimizer updates and checkpoints hold.
  c10::ScalarType param = c10::ScalarType::Float;
  // What gradients are rounded to before they travel. They travel in the narrower of this and their own type, and are
  // summed and accumulated in fp32 always, so kFloat costs nothing beside 16-bit parameters. kFloat, kBFloat16 or
  // kHalf; units whose gradients are reduced once a step need kFloat.
  c10::ScalarType reduce = c10::ScalarType::Float;
  // What Engine::forward casts floating-point results to; nullopt: they stay as they come. One for the whole model. A
  // step without a forward of that kind is refused, since nothing would be cast.
  std::optional<c10::ScalarType> output{};
  bool operator==(const MixedPrecision&) const = default;
};

// What may differ between units.
struct UnitOptions {
  Strategy strategy = Strategy::kFullShard;
  // Ranks that share one copy of the unit; 0 = all. Less than all (hybrid sharding, HSDP): ranks [0, n), [n, 2n), ...
  // hold a copy each, gather within it only, and average gradients over all ranks. REQUIRES a divisor of the world
  // size; kReplicate shares nothing and takes 0 or 1.
  int shard_group = 0;
  MixedPrecision precision{};
  bool operator==(const UnitOptions&) const = default;
};

// Which sub-modules are units: gathered and freed together. Parameters of no unit form the root unit.
struct Units {
  std::function<bool(const std::string& name, const torch::nn::Module&)> predicate{};  // if set, decides alone
  std::vector<std::string> names{};   // else, if not empty: exactly these; each must exist
  std::size_t max_bytes = 32u << 20;  // else: the largest sub-modules of at most this many parameter bytes
};

namespace detail {
template <class T, class = void>
struct ModuleImpl {
  using type = T;
};
template <class T>
struct ModuleImpl<T, std::void_t<typename T::ContainedType>> {
  using type = typename T::ContainedType;  // a holder made by TORCH_MODULE
};
}  // namespace detail

// Every sub-module of one of these types, holders (`Block`) or implementations (`BlockImpl`). A match inside a match
// is a unit of its own.
template <class... Modules>
Units units() {
  static_assert(sizeof...(Modules) > 0, "name at least one module type: fsdp::units<Block>()");
  return {.predicate =
              [](const std::string&, const torch::nn::Module& module) {
                return ((dynamic_cast<const typename detail::ModuleImpl<Modules>::type*>(&module) != nullptr) || ...);
              },
          .names = {}};
}
// The largest sub-modules of at most `bytes` parameter bytes each; REQUIRES bytes > 0.
Units units_by_size(std::size_t bytes);
// Every sub-module (the root excepted) for which the predicate holds; `name` is dotted, as in named_modules().
Units units_if(std::function<bool(const std::string& name, const torch::nn::Module&)> predicate);
// The sub-modules of these dotted names; a name that the model lacks is an error of shard().
Units units_named(std::vector<std::string> names);

struct ShardOptions {
  Units units{};
  // For every unit that per_unit leaves alone; see UnitOptions.
  Strategy strategy = Strategy::kFullShard;
  int shard_group = 0;
  MixedPrecision precision{};
  // Units gathered ahead once the timeline is known; 0 = on demand. The arena has prefetch + 2 slots of the largest
  // unit's size; 2 where every unit keeps its parameters whole, none where gradients stay whole too.
  int prefetch = 1;
  // The bits of a step do not depend on the number of ranks, for a global batch cut into micro-batches 0, 1, 2, ... of
  // which rank r of W runs r, r + W, r + 2W, ... in this order: gradients are summed in the order of micro-batches and
  // divided once, and norms are summed exactly. Each micro-batch is one backward of a loss that Engine::weigh has seen.
  // Costs one more pass over the gradients where a norm is finite. For strategies that reduce each backward
  // (kFullShard, kShardGradients); Engine::gradient_views and summon give undivided sums.
  bool ordered_sums = false;
  // A unit's weights are updated as soon as its gradients are reduced, in backward, and no gradient is kept: the memory
  // for them is that of one unit's share. A step is one backward; it cannot be clipped, skipped, scaled or taken back,
  // and once a unit's gradients are complete it may not be used again before Optimizer::step. For AdamW, Adam and SGD,
  // and for kFullShard and kShardGradients. Units with copies (shard_group) keep their share's gradients.
  bool update_in_backward = false;
  // Options of one unit, by its dotted name ("(root)" for the parameters of no unit); nullopt = those above. Called
  // once per unit, in fsdp::shard; the same on every rank.
  std::function<std::optional<UnitOptions>(const std::string& unit_name)> per_unit{};
};

}  // namespace fsdp
