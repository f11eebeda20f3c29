#include <fsdp/recompute.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/custom_class.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <fsdp/error.h>

#include "memory/torch_compat.h"
#include "memory/torch_random.h"

namespace fsdp {
namespace {

struct Autocast {
  bool enabled = at::autocast::is_autocast_enabled(at::kCPU);
  at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  bool caches = at::autocast::is_autocast_cache_enabled();
  void apply() const {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_cache_enabled(caches);
  }
};

// The settings of the first run, without autocast's cache of weights: what it keeps from a run without gradients would
// be found by one with them, and the weights' gradients would be lost.
class ScopedAutocast {
 public:
  explicit ScopedAutocast(Autocast settings) {
    settings.caches = false;
    settings.apply();
  }
  ScopedAutocast(const ScopedAutocast&) = delete;
  ScopedAutocast& operator=(const ScopedAutocast&) = delete;
  ~ScopedAutocast() { before_.apply(); }

 private:
  Autocast before_;
};

class ScopedRandomState {
 public:
  explicit ScopedRandomState(const at::Tensor& state) : before_(random_state()) { set_random_state(state); }
  ScopedRandomState(const ScopedRandomState&) = delete;
  ScopedRandomState& operator=(const ScopedRandomState&) = delete;
  ~ScopedRandomState() { set_random_state(before_); }

 private:
  at::Tensor before_;
};

struct FirstRun final : torch::CustomClassHolder {
  detail::RecomputedFunction function;
  at::Tensor random_state;
  Autocast autocast;
  bool inputs_on_host;
  std::vector<c10::Device> devices;  // of each input
  std::vector<bool> requires_grad;
};

at::Tensor moved(const at::Tensor& tensor, c10::Device device) {
  return tensor.device() == device ? tensor : tensor.detach().to(device);
}

constexpr const char* kFirstRun = "first_run";

struct Recompute final : torch::autograd::Function<Recompute> {
  // `anchor` requires grad, so that the outputs do: parameters that the function captures are not among the inputs.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, at::TensorList inputs,
                                                const at::Tensor& /*anchor*/, const c10::intrusive_ptr<FirstRun>& run) {
    context->saved_data[kFirstRun] = c10::IValue::make_capsule(run);
    torch::autograd::variable_list kept;
    for (const at::Tensor& input : inputs) {
      run->devices.push_back(input.device());
      run->requires_grad.push_back(input.requires_grad());
      kept.push_back(run->inputs_on_host ? moved(input, at::kCPU) : input);
    }
    context->save_for_backward(kept);
    const ScopedAutocast autocast(run->autocast);
    torch::autograd::variable_list outputs = run->function(inputs.vec());
    torch::autograd::variable_list integers;
    for (const at::Tensor& output : outputs) {
      if (!output.defined()) throw InvalidArgument("fsdp::recompute: expected the function to return defined tensors");
      if (!output.is_floating_point() && !output.is_complex()) integers.push_back(output);
    }
    context->mark_non_differentiable(integers);
    return outputs;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (!backward_reaches_every_leaf()) {
      throw InvalidArgument(
          "fsdp::recompute: torch::autograd::grad, or backward with inputs, came to a recomputed part, whose second "
          "run "
          "accumulates into every parameter it uses; call backward(), or run this part without recompute");
    }
    const auto run = c10::static_intrusive_pointer_cast<FirstRun>(context->saved_data[kFirstRun].toCapsule());
    torch::autograd::variable_list inputs;
    const torch::autograd::variable_list saved = context->get_saved_variables();
    for (std::size_t i = 0; i < saved.size(); ++i)
      inputs.push_back(moved(saved[i], run->devices[i]).detach().requires_grad_(run->requires_grad[i]));
    torch::autograd::variable_list outputs;
    {
      const at::AutoGradMode with_graph(true);
      const ScopedRandomState random(run->random_state);
      const ScopedAutocast autocast(run->autocast);
      outputs = run->function(inputs);
    }
    torch::autograd::variable_list roots, root_gradients;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    outputs.clear();
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    torch::autograd::variable_list result;
    for (const at::Tensor& input : inputs) result.push_back(input.requires_grad() ? input.grad() : at::Tensor());
    result.insert(result.end(), 2, at::Tensor());  // the anchor and the first run
    return result;
  }
};

}  // namespace

namespace detail {

std::vector<at::Tensor> recompute(const RecomputeOptions& options, RecomputedFunction function,
                                  std::vector<at::Tensor> inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto run = c10::make_intrusive<FirstRun>();
  // LibTorch's Function takes defined tensors only; a function may have optional ones.
  std::vector<bool> is_given;
  for (const at::Tensor& input : inputs) is_given.push_back(input.defined());
  std::erase_if(inputs, [](const at::Tensor& input) { return !input.defined(); });
  run->function = [function = std::move(function), is_given](const std::vector<at::Tensor>& given) {
    std::vector<at::Tensor> all;
    auto next = given.begin();
    for (const bool is_next : is_given) all.push_back(is_next ? *next++ : at::Tensor());
    return function(all);
  };
  run->inputs_on_host = options.inputs_on_host;
  run->random_state = random_state();
  return Recompute::apply(at::TensorList(inputs), at::zeros({}).requires_grad_(true), run);
}

}  // namespace detail
}  // namespace fsdp
