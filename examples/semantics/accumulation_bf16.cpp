// Four micro-batches a step in bf16, with fp32 master weights: gradients stay local until the last one.
//   build/release/cli/fsdp run -n 2 -- build/release/examples/semantics/accumulation_bf16
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>
#include <optional>

int main() {
  const auto context = fsdp::init();
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(32, 128), torch::nn::GELU(), torch::nn::Linear(128, 32));
  auto engine = fsdp::shard(context, model,
                            {.units = fsdp::units<torch::nn::Linear>(), .precision = {.param = torch::kBFloat16}});
  auto optimizer = engine.optimizer(fsdp::AdamW{.lr = 3e-3});
  optimizer.set_schedule(fsdp::warmup_cosine(/*warmup_steps=*/5, /*total_steps=*/60));

  torch::manual_seed(1 + context.rank());
  constexpr int kMicroBatches = 4;
  const auto x = torch::randn({kMicroBatches * 16, 32}), target = x.roll(1, /*dims=*/1);
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    last = 0;
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      std::optional<fsdp::NoSync> local;  // reduced with the last micro-batch, all of them at once
      if (micro + 1 < kMicroBatches) local.emplace(engine.no_sync());
      const auto input = x.slice(0, micro * 16, micro * 16 + 16).to(torch::kBFloat16);
      const auto output = model->forward(input).to(torch::kFloat);
      const auto loss = torch::mse_loss(output, target.slice(0, micro * 16, micro * 16 + 16)) / kMicroBatches;
      loss.backward();
      last += context.mean(loss.item<double>());
    }
    optimizer.step({.max_grad_norm = 1.0});
    if (step == 0) first = last;
  }
  if (context.is_main()) std::cout << "loss " << first << " -> " << last << '\n' << engine.plan().to_string();
  return last < first / 2 ? 0 : 1;
}
