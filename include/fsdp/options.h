// How a model is cut into units and run. Plain aggregates with defaults.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {

// What each rank keeps. kFullShard (ZeRO-3): parameters, gradients and optimizer state are all sharded.
enum class Strategy { kFullShard };

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
  Strategy strategy = Strategy::kFullShard;
  // Ranks that share one copy of the model; 0 = all. Less than all (hybrid sharding, HSDP): ranks [0, n), [n, 2n), ...
  // hold a copy each, gather within it only, and average gradients over all ranks. REQUIRES a divisor of the world
  // size.
  int shard_group = 0;
  // Units gathered ahead once the timeline is known; 0 = on demand. The arena has prefetch + 2 slots of the largest
  // unit's size.
  int prefetch = 1;
};

}  // namespace fsdp
