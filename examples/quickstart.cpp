// A classifier whose parameters, gradients and Adam states are sharded over the ranks. One process: build/release/examples/quickstart
// Two of them: build/release/cli/fsdp run -n 2 -- build/release/examples/quickstart
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

// An ordinary LibTorch module: nothing in it knows of libfsdp.
struct ResidualImpl : torch::nn::Module {
  explicit ResidualImpl(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::relu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Residual);

int main() {
  const auto context = fsdp::init();  // who am I: from the launcher's variables, or else one rank
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(16, 64), Residual(64), Residual(64), torch::nn::Linear(64, 4));

  auto engine = fsdp::shard(context, model, {.units = fsdp::units<Residual>()});
  auto optimizer = engine.optimizer(fsdp::AdamW{.lr = 1e-3});

  torch::manual_seed(1 + context.rank());  // each rank draws its own batches
  for (int step = 1; step <= 200; ++step) {
    const auto data = torch::randn({32, 16});
    const auto target = data.slice(/*dim=*/1, 0, 4).argmax(1);
    const auto loss = torch::nn::functional::cross_entropy(model->forward(data), target);
    loss.backward();   // gradients are averaged over the ranks and sharded as they arise
    optimizer.step();  // and cleared here
    const double mean_loss = context.mean(loss.item<double>());
    if (context.is_main() && step % 50 == 0) std::cout << "step " << step << "  loss " << mean_loss << '\n';
  }
  engine.consolidate("quickstart.safetensors");  // one file with whole tensors
}
