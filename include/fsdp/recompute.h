// Activation recomputation: a part of forward keeps its inputs only, and runs again in backward. The technique is that
// of Chen et al. (arXiv:1604.06174).
#pragma once

#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/outputs.h>

namespace fsdp {

struct RecomputeOptions {
  // What is kept from forward to backward, the inputs, is kept in host memory: copied there before the first run, and
  // back before the second, on the device's current stream, which the call waits for. Inputs that lie there stay where they
  // are.
  bool inputs_on_host = false;
};

namespace detail {
using RecomputedFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> recompute(const RecomputeOptions& options, RecomputedFunction function,
                                  std::vector<at::Tensor> inputs);
}  // namespace detail

// function(inputs...), whose intermediate tensors are dropped after forward and made again in backward, under the
// random state, autocast settings and gradient mode of the first time: outputs and gradients have the bits of a plain
// call, dropout included.
//
//   x = fsdp::recompute([this](const at::Tensor& h) { return block->forward(h); }, x);
//
// The function takes tensors and returns a tensor, a vector or a tuple of tensors; what else it needs it captures, by
// value where that ends before backward does: the function is kept (copied) until the graph is gone. It may call
// recompute itself, and it may use any unit of an engine, whose timeline sees the second run as it sees the first. No
// input need require grad: parameters that the function captures get their gradients all the same. Tensors that it
// captures are not saved: gradients reach leaves among them only. With gradients off it is a plain call. Backward must
// be backward(): torch::autograd::grad throws, since a second run accumulates into the parameters it finds. The random
// state is that of LibTorch's default CPU generator, so a function that draws from it must not run on two thread ranks
// at once. Inputs changed in place after the call throw in backward, but those of which a copy is kept.
//
//   x = fsdp::recompute({.inputs_on_host = true}, function, x);
template <class Function, class... Inputs>
auto recompute(const RecomputeOptions& options, Function&& function, const Inputs&... inputs) {
  static_assert((std::is_convertible_v<const Inputs&, at::Tensor> && ...), "the inputs of recompute are tensors");
  using Result = std::decay_t<std::invoke_result_t<std::decay_t<Function>&, const Inputs&...>>;
  using Outputs = detail::Outputs<Result>;
  return Outputs::unpack(
      detail::recompute(options,
                        [kept = std::forward<Function>(function)](const std::vector<at::Tensor>& given) mutable {
                          return [&]<std::size_t... index>(std::index_sequence<index...>) {
                            return Outputs::pack(kept(given[index]...));
                          }
                          (std::index_sequence_for<Inputs...>());
                        },
                        {inputs...}));
}

template <class Function, class... Inputs>
  requires(!std::is_same_v<std::decay_t<Function>, RecomputeOptions>)
auto recompute(Function&& function, const Inputs&... inputs) {
  return recompute(RecomputeOptions{}, std::forward<Function>(function), inputs...);
}

}  // namespace fsdp
