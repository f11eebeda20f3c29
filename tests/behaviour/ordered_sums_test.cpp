// ShardOptions::ordered_sums: a global batch of fixed micro-batches has the same step, to the bit, at any number of ranks.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSteps = 4;

struct Setting {
  const char* name = "FullShard";
  ShardOptions options{};
  int micro_batches = 12;
  StepOptions step{.max_grad_norm = 0.05};
  bool loses_uses = false;  // some micro-batches leave out a unit, some a parameter
  bool muon = false;
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

struct Outcome {
  Tensors values;  // weights, states and averages
  std::vector<double> norms;
};

std::shared_ptr<FunctionModel> make_model(bool loses_uses) {
  at::manual_seed(5);
  return std::make_shared<FunctionModel>([loses_uses](FunctionModel& model, const at::Tensor& input) {
    const at::Tensor x = input.to(model.w.scalar_type());
    const auto kind = loses_uses ? x.size(0) % 4 : 3;
    const at::Tensor hidden = kind == 0   ? x
                              : kind == 1 ? x.matmul(model.a->weight.narrow(0, 0, FunctionModel::kWidth))
                                          : model.a(x).narrow(1, 5, FunctionModel::kWidth);
    return (kind == 2 ? at::tanh(model.b(hidden)) : at::tanh(model.b(hidden)).matmul(model.w)).to(at::kFloat);
  });
}

// Micro-batch m of a step has between 1 and 5 rows.
Batch micro_batch(int step, int m) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 * step + m));
  const std::int64_t rows = 1 + (m * 7 + step) % 5;
  return {at::randn({rows, FunctionModel::kWidth}, generator), at::randn({rows, FunctionModel::kWidth}, generator)};
}

Outcome train(const Setting& setting, int world_size, const ShardOptions& options) {
  Outcome outcome;
  run_ranks(world_size, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn([&] { return make_model(setting.loses_uses); });
    Engine engine = shard(context, model, options);
    Optimizer optimizer = setting.muon ? engine.optimizer(Muon{.lr = 0.01}) : engine.optimizer(AdamW{.lr = 1e-2});
    if (!setting.muon) engine.keep_ema({.decay = 0.8});
    std::vector<double> norms;
    for (int step = 0; step < kSteps; ++step) {
      for (int m = context.rank(); m < setting.micro_batches; m += world_size) {
        const Batch batch = micro_batch(step, m);
        engine.weigh(model->loss(batch.input, batch.target), 0.1 * static_cast<double>(batch.input.size(0))).backward();
      }
      norms.push_back(optimizer.step(setting.step).grad_norm);
    }
    const Tensors values = assemble(context, engine.shard_views());
    if (context.is_main()) outcome = {values, norms};
  });
  return outcome;
}

bool has_the_same_bits(const Outcome& a, const Outcome& b) {
  bool same = a.norms.size() == b.norms.size() &&
              std::memcmp(a.norms.data(), b.norms.data(), a.norms.size() * sizeof(double)) == 0;
  for (const auto& [name, value] : a.values) {
    const at::Tensor x = value.contiguous(), y = b.values.at(name).contiguous();
    same &= std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
  }
  return same && a.values.size() == b.values.size();
}

class OrderedSumsTest : public ::testing::TestWithParam<Setting> {
 protected:
  static ShardOptions options() {
    ShardOptions options = GetParam().options;
    options.units = units_named({"a", "b"});
    options.ordered_sums = true;
    return options;
  }
};

TEST_P(OrderedSumsTest, HasTheSameBitsAtAnyNumberOfRanks) {
  ShardOptions alone = options();
  alone.shard_group = 0;
  const Outcome one = train(GetParam(), 1, alone);
  for (const double norm : one.norms) EXPECT_GT(norm, 0);
  for (const int world_size : {2, 3, 4, 5}) {
    ShardOptions chosen = options();
    if (chosen.shard_group > 0 && world_size % chosen.shard_group != 0) continue;
    for (const int prefetch : {0, 1, 2}) {
      chosen.prefetch = prefetch;
      EXPECT_TRUE(has_the_same_bits(train(GetParam(), world_size, chosen), one)) << world_size << " ranks";
    }
  }
}

std::vector<Setting> settings() {
  std::vector<Setting> all{{}};
  all.push_back({.name = "ShardGradients", .options = {.strategy = Strategy::kShardGradients}});
  all.push_back({.name = "HybridOfTwo", .options = {.shard_group = 2}});
  all.push_back({.name = "CopiesOnly", .options = {.shard_group = 1}});
  all.push_back({.name = "Bf16", .options = {.precision = {.param = at::kBFloat16}}});
  all.push_back({.name = "Bf16OnTheWay", .options = {.precision = {.reduce = at::kBFloat16}}});
  all.push_back({.name = "OneNorm", .step = {.max_grad_norm = 0.5, .norm_type = 1}});
  all.push_back({.name = "ThirdNorm", .step = {.max_grad_norm = 0.05, .norm_type = 3}});
  all.push_back({.name = "LargestNorm", .step = {.max_grad_norm = 0.01, .norm_type = INFINITY}});
  all.push_back({.name = "ByValue", .step = {.max_grad_value = 0.001}});
  all.push_back({.name = "FewerMicroBatchesThanRanks", .micro_batches = 3});
  all.push_back({.name = "UnevenShares", .micro_batches = 7});
  all.push_back({.name = "UnusedUnitsAndParameters", .loses_uses = true});
  all.push_back({.name = "UnusedUnitsKept", .options = {.strategy = Strategy::kShardGradients}, .loses_uses = true});
  all.push_back({.name = "Muon", .muon = true});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Settings, OrderedSumsTest, ::testing::ValuesIn(settings()),
                         [](const auto& test) { return std::string(test.param.name); });

// Another order of the same sums: the numbers of the other mode.
TEST(OrderedSumsOffTest, ThereAreTheSameNumbers) {
  ShardOptions options{.units = units_named({"a", "b"})};
  const Outcome off = train({}, 2, options);
  options.ordered_sums = true;
  const Outcome on = train({}, 2, options);
  for (const auto& [name, value] : off.values) expect_equal(on.values.at(name), value, 1e-5, 1e-4, name);
  for (std::size_t step = 0; step < off.norms.size(); ++step) EXPECT_NEAR(on.norms[step], off.norms[step], 1e-6);
}

// What the mode is for; should this fail, the tests above prove nothing.
TEST(OrderedSumsOffTest, ThereAreOtherBitsAtAnotherNumberOfRanks) {
  const ShardOptions options{.units = units_named({"a", "b"})};
  EXPECT_FALSE(has_the_same_bits(train({}, 2, options), train({}, 1, options)));
}

// One rank is done with all its micro-batches, none of which uses a unit, before the other begins: more of them than
// ranks keep places for.
TEST(OrderedSumsOrderTest, HoldsWhereARankOutrunsTheOther) {
  constexpr int kMicroBatches = 40;
  const auto train_with = [](int world_size) {
    Tensors values;
    std::atomic<int> weighed{0};
    run_ranks(world_size,
              [&](const Context& context) {
                at::set_num_threads(1);
                const auto model = in_turn([] { return make_model(false); });
                Engine engine = shard(context, model, {.units = units_named({"a", "b"}), .ordered_sums = true});
                Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
                while (context.rank() == 1 && weighed < kMicroBatches / 2) std::this_thread::yield();
                for (int m = context.rank(); m < kMicroBatches; m += world_size) {
                  const Batch batch = micro_batch(0, m);
                  const at::Tensor alone = at::ones({3}).requires_grad_(true);
                  engine.weigh(m % 2 == 0 ? alone.sum() : model->loss(batch.input, batch.target), 1).backward();
                  ++weighed;
                }
                optimizer.step();
                const Tensors own = assemble(context, engine.shard_views());
                if (context.is_main()) values = own;
              },
              {.timeout = std::chrono::seconds(20)});
    return values;
  };
  const Tensors expected = train_with(1);
  for (const auto& [name, value] : train_with(2)) expect_equal(value, expected.at(name), 0, 0, name);
}

void on_one_rank(const std::function<void(FunctionModel&, Engine&, Optimizer&)>& body) {
  run_ranks(1, [&](const Context& context) {
    const auto model = in_turn([] { return make_model(false); });
    Engine engine = shard(context, model, {.units = units_named({"a", "b"}), .ordered_sums = true});
    Optimizer optimizer = engine.optimizer(SGD{});
    body(*model, engine, optimizer);
  });
}

TEST(OrderedSumsRefusalTest, ABackwardThatIsNotWeighed) {
  on_one_rank([](FunctionModel& model, Engine& engine, Optimizer& optimizer) {
    const Batch batch = micro_batch(0, 0);
    EXPECT_THAT(text_of<InvalidArgument>([&] { model.loss(batch.input, batch.target).backward(); }),
                AllOf(HasSubstr("ordered_sums"), HasSubstr("weigh")));
    optimizer.zero_grad();
    engine.weigh(model.loss(batch.input, batch.target), 1).backward();
    EXPECT_GT(optimizer.step().grad_norm, 0);
  });
}

// Views are a settlement in the middle of the order.
TEST(OrderedSumsOrderTest, GoesOnAfterGradientsWereRead) {
  Tensors of_one;
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const auto model = in_turn([] { return make_model(false); });
      Engine engine = shard(context, model, {.units = units_named({"a", "b"}), .ordered_sums = true});
      Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
      for (int m = 0; m < 4; ++m) {
        const Batch batch = micro_batch(0, m);
        if (m % world_size == context.rank()) engine.weigh(model->loss(batch.input, batch.target), 1).backward();
        engine.gradient_views();
      }
      optimizer.step();
      const Tensors own = assemble(context, engine.shard_views());
      if (context.is_main() && world_size == 1) of_one = own;
      for (const auto& [name, value] : own) expect_equal(value, of_one.at(name), 0, 0, name);
    });
  }
}

TEST(OrderedSumsRefusalTest, ASecondBackwardOfOneMicroBatch) {
  on_one_rank([](FunctionModel& model, Engine& engine, Optimizer&) {
    const Batch batch = micro_batch(0, 0);
    const at::Tensor loss = engine.weigh(model.loss(batch.input, batch.target), 1);
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_THAT(text_of<InvalidArgument>([&] { loss.backward(); }), HasSubstr("each micro-batch is one"));
  });
}

TEST(OrderedSumsRefusalTest, StrategiesAndScopesThatAddUpInAnotherOrder) {
  run_ranks(2, [](const Context& context) {
    for (const Strategy strategy : {Strategy::kReplicate, Strategy::kShardOptimizer}) {
      const auto model = in_turn([] { return make_model(false); });
      EXPECT_THAT(
          text_of<InvalidArgument>([&] { shard(context, model, {.strategy = strategy, .ordered_sums = true}); }),
          AllOf(HasSubstr("ordered_sums"), HasSubstr("strategy"), HasSubstr("choose kShardGradients")));
    }
    const auto model = in_turn([] { return make_model(false); });
    Engine engine = shard(context, model, {.ordered_sums = true});
    EXPECT_THAT(text_of<InvalidArgument>([&] { const NoSync scope = engine.no_sync(); }),
                AllOf(HasSubstr("no_sync"), HasSubstr("ordered_sums")));
  });
}

}  // namespace
}  // namespace fsdp::testing
