// A mesh of four ranks as threads of this process: two replicas of two ranks, and a unit that every rank holds whole.
//   examples/semantics/hybrid_mesh
#include <fsdp/fsdp.h>
#include <fsdp/testing.h>
#include <torch/torch.h>

#include <iostream>
#include <mutex>

int main() {
  constexpr int kRanks = 4;
  std::mutex mutex;
  double first = 0, last = 0;
  fsdp::run_ranks(kRanks, [&](const fsdp::Context& context) {
    torch::set_num_threads(1);
    torch::nn::Sequential model{nullptr};
    {
      const std::lock_guard lock(mutex);  // threads share LibTorch's random generator
      torch::manual_seed(0);
      model = torch::nn::Sequential(torch::nn::Linear(32, 256), torch::nn::Tanh(), torch::nn::Linear(256, 32),
                                    torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
    }
    auto engine = fsdp::shard(context, model,
                              {.units = fsdp::units<torch::nn::Linear, torch::nn::LayerNorm>(),
                               .shard_group = 2,  // ranks 0 and 1 hold a copy between them, ranks 2 and 3 another
                               .per_unit = [](const std::string& unit) -> std::optional<fsdp::UnitOptions> {
                                 if (unit == "3")
                                   return fsdp::UnitOptions{.strategy = fsdp::Strategy::kReplicate};  // the small norm
                                 return std::nullopt;
                               }});
    auto optimizer = engine.optimizer(fsdp::AdamW{.lr = 1e-2});
    const auto x = torch::linspace(-1, 1, 64 * 32).reshape({64, 32}).roll(context.rank() * 5, 0);
    for (int step = 0; step < 60; ++step) {
      const auto loss = torch::mse_loss(model->forward(x), x.flip(1));
      loss.backward();
      optimizer.step();
      const double mean_loss = context.mean(loss.item<double>());
      if (!context.is_main()) continue;
      last = mean_loss;
      if (step == 0) first = last;
    }
    const auto plan = engine.plan();
    if (context.is_main()) std::cout << plan.to_string();
  });
  std::cout << "loss " << first << " -> " << last << '\n';
  return last < first / 2 ? 0 : 1;
}
