// A frozen base with trained adapters (LoRA): the base has no gradients and no optimizer state.
//   build/release/cli/fsdp run -n 2 -- build/release/examples/semantics/lora
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

// y = W x + B A x, with W frozen.
struct LoraLinearImpl : torch::nn::Module {
  LoraLinearImpl(int64_t width, int64_t rank) : base(register_module("base", torch::nn::Linear(width, width))) {
    for (auto& parameter : base->parameters()) parameter.requires_grad_(false);  // before fsdp::shard
    a = register_parameter("a", torch::randn({rank, width}) / 8);
    b = register_parameter("b", torch::zeros({width, rank}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return base(x) + x.matmul(a.t()).matmul(b.t()); }
  torch::nn::Linear base;
  torch::Tensor a, b;
};
TORCH_MODULE(LoraLinear);

int main() {
  const auto context = fsdp::init();
  torch::manual_seed(0);
  torch::nn::Sequential model(LoraLinear(64, 4), torch::nn::ReLU(), LoraLinear(64, 4));
  auto engine = fsdp::shard(context, model, {.units = fsdp::units<LoraLinear>()});
  auto optimizer = engine.optimizer(fsdp::AdamW{.lr = 1e-2});

  const auto x = torch::randn({32, 64}), target = torch::randn({32, 64});
  double first = 0, last = 0;
  for (int step = 0; step < 50; ++step) {
    const auto loss = torch::mse_loss(model->forward(x), target);
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  const auto memory = engine.memory();
  if (context.is_main()) {
    std::cout << "loss " << first << " -> " << last << "; parameters " << memory.parameter_shard_bytes
              << " bytes a rank, gradients " << memory.gradient_shard_bytes << ", Adam " << memory.optimizer_bytes
              << '\n';
  }
  // The adapters are 1/8 of the base: so are their gradients.
  return last < first && memory.gradient_shard_bytes * 6 < memory.parameter_shard_bytes ? 0 : 1;
}
