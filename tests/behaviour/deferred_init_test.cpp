// Modules made without memory: the same weights at any number of ranks as materialised in one process, and no whole
// copy anywhere.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>

#include "tests/behaviour/function_model.h"
#include "tests/support/counting_allocator.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kWide = 160;  // a kWide x kWide fp32 weight has more than 64 KiB

// What initialisers do: kaiming and xavier, ones and zeros, a row zeroed, a factory's random values, ones that need
// values.
struct Zoo final : LossModel {
  Zoo() : LossModel("Zoo") {
    embedding = register_module("embedding",
                                torch::nn::Embedding(torch::nn::EmbeddingOptions(300, kWide).padding_idx(3)));
    linear = register_module("linear", torch::nn::Linear(kWide, kWide));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(kWide, kWide).batch_first(true)));
    norm = register_module("norm", torch::nn::BatchNorm1d(kWide));
    orthogonal = register_parameter("orthogonal", torch::nn::init::orthogonal_(torch::empty({kWide, kWide})));
    random = register_parameter("random", torch::randn({kWide, kWide}));
    scaled = register_parameter("scaled", torch::randn({kWide, kWide}) * 0.25);
    filled = register_parameter("filled", torch::full({kWide, kWide}, 0.5));
    large = register_buffer("large", torch::ones({kWide, kWide}));
    torch::nn::init::xavier_normal_(linear->weight);
    torch::nn::init::zeros_(linear->bias);
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    const at::Tensor x = at::tanh(linear(embedding(input)));
    const at::Tensor y = std::get<0>(lstm(x)).matmul(orthogonal).matmul(random * scaled + filled * large);
    return at::mse_loss(at::tanh(0.01 * y), target);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear linear{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor orthogonal, random, scaled, filled, large;
};

std::shared_ptr<Zoo> make_zoo(std::uint64_t seed = 7) {
  return deferred_init(seed, [] { return std::make_shared<Zoo>(); });
}

Batch zoo_batch() {
  const at::Tensor input = at::arange(12 * 5).remainder(300).reshape({12, 5});
  return {input, at::linspace(-1, 1, 12 * 5 * kWide).reshape({12, 5, kWide})};
}

TEST(DeferredInitTest, HasTheOneProcessWeightsAtAnyWorldSizeAndStrategy) {
  at::set_num_threads(1);
  at::manual_seed(1);
  const auto twin = make_zoo();
  materialize(*twin);
  const Tensors expected = parameters_of(*twin);
  for (const int world_size : {1, 2, 3, 4}) {
    for (const Strategy strategy : {Strategy::kFullShard, Strategy::kShardGradients, Strategy::kReplicate}) {
      run_ranks(world_size, [&](const Context& context) {
        at::set_num_threads(1);
        // orthogonal_ draws from LibTorch's own generator only where no note can be made; rank 0's values count.
        const auto model = in_turn([&] {
          at::manual_seed(1);
          return make_zoo();
        });
        Engine engine = shard(context, model,
                              {.units = units<torch::nn::Linear, torch::nn::LSTM>(), .strategy = strategy});
        for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, expected.at(name), 0, 0, name);
        expect_equal(model->large, at::ones({kWide, kWide}), 0, 0, "large");
        const Batch batch = part_of(zoo_batch(), context.rank(), world_size);
        if (12 % world_size == 0) model->loss(batch.input, batch.target).backward();
      });
    }
  }
  EXPECT_EQ(expected.at("embedding.weight")[3].abs().max().item<double>(), 0);
  EXPECT_EQ(expected.at("linear.bias").abs().max().item<double>(), 0);
  EXPECT_NEAR(expected.at("random").std().item<double>(), 1, 0.02);
  EXPECT_NEAR(expected.at("scaled").std().item<double>(), 0.25, 0.005);
  EXPECT_NEAR(expected.at("linear.weight").std().item<double>(), std::sqrt(1.0 / kWide), 0.002);
  EXPECT_EQ(expected.at("filled").min().item<double>(), 0.5);
  const at::Tensor q = expected.at("orthogonal");
  EXPECT_LT((q.matmul(q.t()) - at::eye(kWide)).abs().max().item<double>(), 1e-4);
}

TEST(DeferredInitTest, TrainsAsItsMaterialisedTwin) {
  Training training;
  training.make_model = [] {
    at::set_num_threads(1);  // orthogonal_ decomposes, and LAPACK's bits depend on it
    at::manual_seed(1);
    return make_zoo();
  };
  training.batch = [](int) { return zoo_batch(); };
  training.steps = 2;
  training.options.units = units<torch::nn::Linear, torch::nn::LSTM>();
  Training plain = training;
  plain.make_model = [make = training.make_model] {
    const auto model = make();
    materialize(*model);
    return model;
  };
  plain.own_kernels = true;
  expect_bit_equal(train_sharded(training, 1), train_plain(plain));
  expect_same(train_sharded(training, 2), train_plain(plain));
}

TEST(DeferredInitTest, KeepsMastersOfWhatIsComputedIn16Bits) {
  const auto twin = make_zoo();
  materialize(*twin);
  run_ranks(2, [&](const Context& context) {
    const auto model = in_turn([] { return make_zoo(); });
    Engine engine = shard(context, model, {.precision = {.param = at::kBFloat16}});
    std::vector<ShardView> views = engine.shard_views();
    const Tensors masters = assemble(context, views);
    expect_equal(masters.at("random"), twin->random.detach(), 0, 0, "random");
    expect_equal(model->random.detach().clone(), twin->random.detach().to(at::kBFloat16), 0, 0, "random");
  });
}

// Four 8 MiB weights, of which a rank holds a quarter: nothing near a whole one is ever there.
TEST(DeferredInitTest, MakesNoWholeCopyOfTheModel) {
  CountingAllocator& allocator = CountingAllocator::install();
  static constexpr std::int64_t kWidth = 1448;
  const std::size_t before = allocator.live_bytes();
  allocator.reset_peak();
  run_ranks(4, [&](const Context& context) {
    const auto model = in_turn(
        [&] { return deferred_init(3, [] { return std::make_shared<StackModel>(4, std::int64_t{kWidth}); }); });
    context.communicator().barrier();
    EXPECT_LT(allocator.peak_bytes() - before, std::size_t{1} << 20);
    Engine engine = shard(context, model, {.units = units<torch::nn::Linear>()});
    context.communicator().barrier();
    EXPECT_LT(allocator.peak_bytes() - before, std::size_t{1} << 20);  // segments are not LibTorch's
  });
}

TEST(DeferredInitTest, LeavesLibTorchsGeneratorAlone) {
  at::manual_seed(5);
  const at::Tensor expected = at::rand({3});
  at::manual_seed(5);
  deferred_init(1, [] { return std::make_shared<StackModel>(2, 8); });  // small: made at once, with keyed numbers
  EXPECT_TRUE(at::equal(at::rand({3}), expected));
  const auto small = [](std::uint64_t seed) {
    return parameters_of(*deferred_init(seed, [] { return std::make_shared<StackModel>(2, 8); }));
  };
  expect_equal(small(1).at("layers.0.weight"), small(1).at("layers.0.weight"), 0, 0, "the same seed");
  EXPECT_FALSE(at::equal(small(1).at("layers.0.weight"), small(2).at("layers.0.weight")));
}

TEST(DeferredInitTest, CanBeReadAndWrittenByOperators) {
  const auto model = make_zoo();
  const auto twin = make_zoo();
  materialize(*twin);
  expect_equal(model->random.detach().sum(), twin->random.detach().sum(), 0, 0, "sum");
  const at::NoGradGuard no_grad;
  model->random.mul_(2);
  twin->random.mul_(2);
  expect_equal(model->random.detach().clone(), twin->random.detach(), 0, 0, "written");
  model->filled.narrow(0, 0, 1).add_(1);
  EXPECT_EQ(model->filled.sum().item<double>(), 0.5 * kWide * kWide + kWide);
  run_ranks(1, [&](const Context& context) {
    Engine engine = shard(context, model, {});
    expect_equal(model->random.detach().clone(), twin->random.detach(), 0, 0, "sharded");
  });
}

TEST(DeferredInitTest, RefusesByName) {
  const auto model = make_zoo();
  EXPECT_THAT(text_of<std::exception>([&] { model->random.data_ptr<float>()[0] = 1; }), HasSubstr("deferred_init"));
  EXPECT_THAT(text_of<InvalidArgument>([] {
                const DeferredInitScope first(1);
                const DeferredInitScope second(2);
              }),
              HasSubstr("a second"));
  run_ranks(2, [](const Context& context) {
    const auto other = in_turn([&] { return make_zoo(static_cast<std::uint64_t>(context.rank())); });
    EXPECT_THAT(text_of<InvalidArgument>([&] { shard(context, other, {}); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("another model")));
  });
}

}  // namespace
}  // namespace fsdp::testing
