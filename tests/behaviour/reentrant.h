// Activation recomputation as users write it today: a Function that runs a block again in backward.
#pragma once

#include <functional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/custom_class.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace fsdp::testing {

using RecomputedBlock = std::function<at::Tensor(const at::Tensor&)>;

namespace detail {

struct BlockHolder final : torch::CustomClassHolder {
  explicit BlockHolder(RecomputedBlock the_block) : block(std::move(the_block)) {}
  RecomputedBlock block;
};

struct Recompute final : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const c10::intrusive_ptr<BlockHolder>& holder) {
    context->save_for_backward({x});
    context->saved_data["block"] = c10::IValue::make_capsule(holder);
    return holder->block(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    const auto holder = c10::static_intrusive_pointer_cast<BlockHolder>(context->saved_data["block"].toCapsule());
    const at::AutoGradMode with_graph(true);
    torch::autograd::backward({holder->block(x)}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};

}  // namespace detail

// `x` must require grad: else the block's parameters get no gradient, as in any reentrant recomputation.
inline at::Tensor recomputed(RecomputedBlock block, const at::Tensor& x) {
  return detail::Recompute::apply(x, c10::make_intrusive<detail::BlockHolder>(std::move(block)));
}

}  // namespace fsdp::testing
