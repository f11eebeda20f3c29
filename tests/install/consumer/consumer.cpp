// A user's program in small: trains a layer with libfsdp as its package offers it.
#include <iostream>
#include <memory>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

int main() {
  auto context = fsdp::init();
  auto model = std::make_shared<torch::nn::LinearImpl>(8, 4);
  auto engine = fsdp::shard(context, model);
  auto optimizer = engine.optimizer(fsdp::AdamW{.lr = 1e-2});
  for (int step = 0; step < 3; ++step) {
    model->forward(torch::ones({2, 8})).square().mean().backward();
    optimizer.step();
  }
  std::cout << "trained " << engine.step() << " steps on " << context.world_size() << " rank\n";
  return engine.step() == 3 ? 0 : 1;
}
