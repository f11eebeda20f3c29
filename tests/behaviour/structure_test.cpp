// What models are made of: ties, frozen and odd parameters, several types, strides, nesting and sharing. All equal
// plain LibTorch at any world size, however the units are cut.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

constexpr std::int64_t kWidth = 8;

Batch rows(int step) {
  auto generator = at::detail::createCPUGenerator(40 + static_cast<std::uint64_t>(step));
  return {at::randn({12, kWidth}, generator), at::randn({12, kWidth}, generator)};
}

// Rows [N, 8] to rows [N, 8].
class RowModel : public LossModel {
 public:
  using LossModel::LossModel;
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    return at::mse_loss(forward(input), target);
  }
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};

// One weight in two units: the second registers the first one's tensor.
class TiedModel final : public RowModel {
 public:
  struct HeadImpl final : torch::nn::Module {
    explicit HeadImpl(const at::Tensor& tied)
        : weight(register_parameter("weight", tied)), bias(register_parameter("bias", at::zeros({kWidth}))) {}
    at::Tensor weight, bias;
  };
  TiedModel() : RowModel("TiedModel") {
    first = register_module("first", Linear(kWidth, kWidth));
    middle = register_module("middle", Linear(kWidth, kWidth));
    head = register_module("head", std::make_shared<HeadImpl>(first->weight));
  }
  at::Tensor forward(const at::Tensor& x) override {
    return at::linear(at::tanh(middle(at::tanh(first(x)))), head->weight, head->bias);
  }
  Linear first{nullptr}, middle{nullptr};
  std::shared_ptr<HeadImpl> head;
};

// Frozen and trained parameters in one unit, a unit all frozen, and one without a bias.
class FrozenModel final : public RowModel {
 public:
  FrozenModel() : RowModel("FrozenModel") {
    trunk = register_module("trunk", Linear(kWidth, kWidth));
    mixed = register_module("mixed", Linear(kWidth, kWidth));
    head = register_module("head", Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    for (const at::Tensor& p : trunk->parameters()) p.requires_grad_(false);
    mixed->weight.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) override { return head(at::tanh(mixed(at::tanh(trunk(x))))); }
  Linear trunk{nullptr}, mixed{nullptr}, head{nullptr};
};

// fp32, fp64, bf16 and frozen int64 in one unit.
class ManyTypesModel final : public RowModel {
 public:
  ManyTypesModel() : RowModel("ManyTypesModel") {
    single = register_parameter("single", at::randn({kWidth, kWidth}));
    wide = register_parameter("wide", at::randn({kWidth, kWidth}, at::kDouble));
    narrow = register_parameter("narrow", at::randn({kWidth}).to(at::kBFloat16));
    order = register_parameter("order", at::arange(kWidth - 1, -1, -1, at::kLong), /*requires_grad=*/false);
    other = register_module("other", Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor y = at::tanh(x.mm(single)).to(at::kDouble).mm(wide).to(at::kFloat).index_select(1, order);
    return other(y * narrow.to(at::kFloat));
  }
  at::Tensor single, wide, narrow, order;
  Linear other{nullptr};
};

// Sizes that no world size divides, none at all, and a scalar.
class OddSizesModel final : public RowModel {
 public:
  OddSizesModel() : RowModel("OddSizesModel") {
    empty = register_parameter("empty", at::zeros({0, 5}));
    temperature = register_parameter("temperature", at::full({}, 0.7));
    odd = register_parameter("odd", at::randn({7, 1, 3}));
    one = register_parameter("one", at::randn({1}));
    layer = register_module("layer", Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) override {
    return layer(x) * temperature + 0.05 * odd.sum() * one + empty.sum();
  }
  at::Tensor empty, temperature, odd, one;
  Linear layer{nullptr};
};

// A transposed weight and a channels-last one.
class StridedModel final : public RowModel {
 public:
  StridedModel() : RowModel("StridedModel") {
    transposed = register_parameter("transposed", at::randn({5, kWidth}).t().clone());
    back = register_parameter("back", at::randn({5, kWidth}));
    kernel = register_parameter("kernel", at::randn({3, 2, 3, 3}).contiguous(at::MemoryFormat::ChannelsLast));
    layer = register_module("layer", Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor image = at::conv2d(x.view({-1, 2, 2, 2}), kernel, {}, 1, 1);
    return at::tanh(layer(x.mm(transposed).mm(back))) + image.view({x.size(0), 3, 4}).sum(1).repeat({1, 2});
  }
  at::Tensor transposed, back, kernel;
  Linear layer{nullptr};
};

// Units inside a unit, with parameters before, between and after them.
class NestedModel final : public RowModel {
 public:
  struct OuterImpl final : torch::nn::Module {
    OuterImpl() {
      scale = register_parameter("scale", at::randn({kWidth}));
      first = register_module("first", Linear(kWidth, kWidth));
      second = register_module("second", Linear(kWidth, kWidth));
    }
    at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x * scale)) * scale) + scale; }
    at::Tensor scale;
    Linear first{nullptr}, second{nullptr};
  };
  NestedModel() : RowModel("NestedModel") {
    for (int i = 0; i < 2; ++i)
      outers.push_back(register_module("outer" + std::to_string(i), std::make_shared<OuterImpl>()));
    offset = register_parameter("offset", at::randn({kWidth}));
  }
  at::Tensor forward(const at::Tensor& x) override {
    return outers[1]->forward(outers[0]->forward(x + offset)) + offset;
  }
  std::vector<std::shared_ptr<OuterImpl>> outers;
  at::Tensor offset;
};

// One module registered under two names, and one that is called twice with another between.
class SharedModel final : public RowModel {
 public:
  SharedModel() : RowModel("SharedModel") {
    shared = register_module("shared", Linear(kWidth, kWidth));
    register_module("again", shared);
    twice = register_module("twice", Linear(kWidth, kWidth));
    between = register_module("between", Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) override {
    return shared(at::tanh(twice(at::tanh(between(at::tanh(twice(at::tanh(shared(x)))))))));
  }
  Linear shared{nullptr}, twice{nullptr}, between{nullptr};
};

template <class Model>
Training training_of(Units units) {
  Training training;
  training.make_model = [] {
    at::manual_seed(3);
    return std::make_shared<Model>();
  };
  training.batch = rows;
  training.options.units = std::move(units);
  return training;
}

template <class Model>
class StructureTest : public ::testing::Test {};
using Structures = ::testing::Types<TiedModel, FrozenModel, OddSizesModel, StridedModel, NestedModel, SharedModel>;
TYPED_TEST_SUITE(StructureTest, Structures);

// By type, by size with several bounds, by name and by predicate.
template <class Model>
std::vector<Units> cuts() {
  const auto first_child = Model().named_children().front().key();
  return {
      units<Linear>(),
      units_by_size(1),
      units_by_size(400),
      units_by_size(1 << 20),
      units_named({first_child}),
      units_if([](const std::string& name, const torch::nn::Module&) { return name.find('.') == std::string::npos; })};
}

TYPED_TEST(StructureTest, EqualsPlainLibTorchHoweverTheUnitsAreCut) {
  const Trace plain = train_plain(training_of<TypeParam>({}));
  for (const Units& units : cuts<TypeParam>()) {
    for (const int world_size : {1, 2, 3}) expect_same(train_sharded(training_of<TypeParam>(units), world_size), plain);
  }
}

// What autograd adds to a gradient that is there already has any strides, those of an expanded scalar included.
TYPED_TEST(StructureTest, AccumulatesOverTwoBackwards) {
  Training training = training_of<TypeParam>(units<Linear>());
  training.steps = 3;
  training.run_step = [](LossModel& model, const Batch& batch) {
    const at::Tensor first = model.loss(batch.input, batch.target), second = model.loss(batch.target, batch.input);
    first.backward();
    second.backward();
    return (first + second).item<double>();
  };
  const Trace plain = train_plain(training);
  for (const int world_size : {1, 2, 3}) expect_same(train_sharded(training, world_size), plain);
}

TYPED_TEST(StructureTest, GivesTheSameBitsAtAnyPrefetch) {
  Training training = training_of<TypeParam>(units<Linear>());
  training.options.prefetch = 0;
  const Trace on_demand = train_sharded(training, 2);
  for (const int prefetch : {1, 2}) {
    training.options.prefetch = prefetch;
    expect_bit_equal(train_sharded(training, 2), on_demand);
  }
}

// Compared in fp64: gradient shards of bf16 parameters are fp32.
Trace widened(Trace trace) {
  for (Tensors& gradients : trace.gradients) {
    for (auto& [name, value] : gradients) value = value.to(at::kDouble);
  }
  for (auto& [name, value] : trace.parameters) value = value.to(at::kDouble);
  return trace;
}

TEST(ManyTypesTest, InOneUnitEqualPlainLibTorch) {
  Training training = training_of<ManyTypesModel>(units<Linear>());
  const Trace plain = widened(train_plain(training));
  for (const int world_size : {1, 2, 3}) {
    // Plain LibTorch rounds gradients and their product with lr to bf16, so the steps drift apart by its precision.
    expect_same(widened(train_sharded(training, world_size)), plain, 1e-2, 2e-2);
  }
  training.steps = 1;
  const Trace first = widened(train_plain(training));
  for (const int world_size : {1, 2, 3}) {
    const Trace sharded = widened(train_sharded(training, world_size));
    for (const char* name : {"single", "wide", "order", "other.weight", "other.bias"}) {
      expect_equal(sharded.parameters.at(name), first.parameters.at(name), 1e-6, 1e-5, name);
    }
    for (const char* name : {"single", "wide", "other.weight"})
      expect_equal(sharded.gradients[0].at(name), first.gradients[0].at(name), 1e-6, 1e-5, name);
    EXPECT_EQ(sharded.gradients[0].count("order"), 0U);
  }
}

TEST(FrozenTest, KeepsItsBitsAndHasNoOptimizerState) {
  run_ranks(2, [](const Context& context) {
    const auto model = std::make_shared<FrozenModel>();
    Engine engine = shard(context, model, {.units = units<Linear>()});
    Optimizer optimizer = engine.optimizer(AdamW{.weight_decay = 0.1});
    const Tensors before = parameters_of(*model);
    for (int step = 0; step < 10; ++step) {
      const Batch batch = rows(step);
      model->loss(batch.input, batch.target).backward();
      optimizer.step();
    }
    const Tensors after = parameters_of(*model);
    for (const char* name : {"trunk.weight", "trunk.bias", "mixed.weight"})
      expect_equal(after.at(name), before.at(name), 0, 0, name);
    for (const char* name : {"mixed.bias", "head.weight"})
      EXPECT_FALSE(at::equal(after.at(name), before.at(name))) << name;
    int states = 0;
    for (const ShardView& view : engine.shard_views()) {
      if (view.kind != ShardKind::kOptimizer) continue;
      ++states;
      EXPECT_THAT(view.name, ::testing::AnyOf(::testing::EndsWith("mixed.bias"), ::testing::EndsWith("head.weight")));
    }
    EXPECT_EQ(states, 4);  // two moments of two parameters
  });
}

TEST(TiedTest, IsHeldOnceAndStaysOneTensor) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Context& context) {
      const auto model = std::make_shared<TiedModel>();
      Engine engine = shard(context, model, {.units = units<Linear>()});
      EXPECT_TRUE(model->head->weight.is_same(model->first->weight));
      std::int64_t numel = 0;
      for (const UnitPlan& unit : engine.plan().units) numel += unit.numel;
      EXPECT_EQ(numel, 2 * (kWidth * kWidth + kWidth) + kWidth);
      int named = 0;
      for (const ShardView& view : engine.shard_views())
        named += view.name == "first.weight" || view.name == "head.weight";
      EXPECT_EQ(named, 1);
    });
  }
}

TEST(ParameterTensorTest, KeepsIdentityShapeStridesAndType) {
  run_ranks(2, [](const Context& context) {
    const auto model = std::make_shared<StridedModel>();
    struct Before {
      std::string name;
      const void* identity;
      std::vector<std::int64_t> sizes, strides;
    };
    std::vector<Before> before;
    for (const auto& item : model->named_parameters()) {
      before.push_back(
          {item.key(), item.value().unsafeGetTensorImpl(), item.value().sizes().vec(), item.value().strides().vec()});
    }
    const Engine engine = shard(context, model, {.units = units<Linear>()});
    const auto after = model->named_parameters();
    for (const Before& b : before) {
      EXPECT_EQ(after[b.name].unsafeGetTensorImpl(), b.identity) << b.name;
      EXPECT_EQ(after[b.name].sizes(), at::IntArrayRef(b.sizes)) << b.name;
      EXPECT_EQ(after[b.name].strides(), at::IntArrayRef(b.strides)) << b.name;
      EXPECT_TRUE(after[b.name].requires_grad() && after[b.name].is_leaf()) << b.name;
    }
  });
}

TEST(UnitsTest, ThatMatchNothingAreRefusedOnEveryRankWithWhatThereIs) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Context& context) {
      const auto refused = [&](Units units) {
        try {
          shard(context, std::make_shared<NestedModel>(), {.units = std::move(units)});
        } catch (const InvalidArgument& error) {
          return std::string(error.what());
        }
        return std::string();
      };
      EXPECT_THAT(refused(units<torch::nn::LSTM>()),
                  AllOf(HasSubstr("units match no sub-module of NestedModel"), HasSubstr("LinearImpl")));
      EXPECT_THAT(refused(units_if([](const std::string&, const torch::nn::Module&) { return false; })),
                  HasSubstr("units match no sub-module"));
      EXPECT_THAT(refused(units_named({"outer0", "outer7"})), AllOf(HasSubstr("outer7"), HasSubstr("outer1")));
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
