// An average of the weights, kept sharded, and evaluation with it.
//   build/release/cli/fsdp run -n 2 -- build/release/examples/semantics/ema
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto context = fsdp::init();
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  auto engine = fsdp::shard(context, model, {.units = fsdp::units<torch::nn::Linear>()});
  auto optimizer = engine.optimizer(fsdp::SGD{.lr = 0.05, .momentum = 0.9});
  engine.keep_ema({.decay = 0.98});  // after optimizer(), before resume()

  const auto held_out = torch::randn({256, 16}), truth = held_out.slice(1, 0, 1).sin();
  const auto evaluate = [&] {
    const torch::NoGradGuard no_grad;
    return torch::mse_loss(model->forward(held_out), truth).item<double>();
  };
  torch::manual_seed(1 + context.rank());
  for (int step = 0; step < 300; ++step) {
    const auto x = torch::randn({8, 16});
    const auto noisy = x.slice(1, 0, 1).sin() + torch::randn({8, 1}) * 0.5;
    torch::mse_loss(model->forward(x), noisy).backward();
    optimizer.step();
  }
  const double last_weights = evaluate();
  double averaged_weights = 0;
  {
    const auto scope = engine.use_ema();  // the parameters are their averages until it ends
    averaged_weights = evaluate();
  }
  if (context.is_main())
    std::cout << "held-out loss of the last weights " << last_weights << ", of their average " << averaged_weights
              << '\n';
  return averaged_weights < last_weights && evaluate() == last_weights ? 0 : 1;
}
