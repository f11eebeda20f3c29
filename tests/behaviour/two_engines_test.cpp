// Several engines in one process: each has its own units, arena and gradients; an operator may use parameters of both.

#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

constexpr std::int64_t kWidth = FunctionModel::kWidth;

// A generator and a discriminator, each with its own engine; the generator's loss runs through the discriminator.
struct AdversarialPair {
  void discriminate(const at::Tensor& noise, const at::Tensor& real) const {
    const at::Tensor fake = generator->forward(noise).detach();
    (discriminator->forward(fake).square().mean() + (discriminator->forward(real) - 1).square().mean()).backward();
  }
  void generate(const at::Tensor& noise) const {
    (discriminator->forward(generator->forward(noise)) - 1).square().mean().backward();
  }

  std::shared_ptr<StackModel> generator = std::make_shared<StackModel>(3, kWidth),
                              discriminator = std::make_shared<StackModel>(2, kWidth);
};

Batch noise_and_real(int step) { return function_batch(step + 50); }

void plain_sgd(StackModel& model) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : model.parameters()) p.sub_(0.1 * p.grad());
}

Tensors plain_adversaries(int steps) {
  at::manual_seed(9);
  const AdversarialPair pair;
  for (int step = 0; step < steps; ++step) {
    const Batch batch = noise_and_real(step);
    pair.discriminate(batch.input, batch.target);
    plain_sgd(*pair.discriminator);
    pair.discriminator->zero_grad();
    pair.generate(batch.input);
    plain_sgd(*pair.generator);
    pair.generator->zero_grad();
    pair.discriminator->zero_grad();
  }
  Tensors result = parameters_of(*pair.generator);
  for (const auto& [name, value] : parameters_of(*pair.discriminator)) result["discriminator." + name] = value;
  return result;
}

TEST(TwoEnginesTest, AGanTrainsAsPlainLibTorchDoes) {
  at::set_num_threads(1);
  constexpr int kSteps = 4;
  const Tensors expected = plain_adversaries(kSteps);
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const AdversarialPair pair = in_turn([] {
        at::manual_seed(9);
        return AdversarialPair();
      });
      const ShardOptions options{.units = units<torch::nn::Linear>()};
      Engine generator = shard(context, pair.generator, options),
             discriminator = shard(context, pair.discriminator, options);
      Optimizer generator_steps = generator.optimizer(SGD{.lr = 0.1}),
                discriminator_steps = discriminator.optimizer(SGD{.lr = 0.1});
      for (int step = 0; step < kSteps; ++step) {
        const Batch batch = part_of(noise_and_real(step), context.rank(), world_size);
        pair.discriminate(batch.input, batch.target);
        discriminator_steps.step();
        pair.generate(batch.input);
        generator_steps.step();
        discriminator_steps.zero_grad();
      }
      for (const auto& [name, value] : parameters_of(*pair.generator))
        expect_equal(value, expected.at(name), 1e-6, 1e-5, name);
      for (const auto& [name, value] : parameters_of(*pair.discriminator)) {
        expect_equal(value, expected.at("discriminator." + name), 1e-6, 1e-5, "discriminator." + name);
      }
    });
  }
}

// One operator that reads parameters of both engines, and one that copies from the one into the other.
TEST(TwoEnginesTest, OneOperatorMayUseParametersOfBoth) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const auto online = std::make_shared<StackModel>(2, kWidth), target = std::make_shared<StackModel>(2, kWidth);
      const ShardOptions options{.units = units<torch::nn::Linear>()};
      Engine online_engine = shard(context, online, options), target_engine = shard(context, target, options);
      const auto from = online->parameters(), to = target->parameters();
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
      for (std::size_t i = 0; i < from.size(); ++i) {
        EXPECT_TRUE(at::equal(to[i], from[i])) << i;
        EXPECT_EQ((to[i] - from[i]).abs().sum().item<double>(), 0) << i;
        EXPECT_NE(from[i].abs().sum().item<double>(), 0) << i;
      }
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
