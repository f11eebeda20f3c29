// What LibTorch's C++ modules do that an engine may not expect: layouts, clones, children under two names, and modules
// that are none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>

#include <fsdp/checkpoint.h>
#include <fsdp/testing.h>

#include "tests/behaviour/function_model.h"
#include "tests/cases/case_support.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;
using torch::nn::Sequential;

ShardOptions options_of(const Layout& layout, Units cut) {
  return {.units = std::move(cut), .strategy = layout.strategy, .shard_group = layout.shard_group};
}

// A layer with a weight that lies transposed in memory, a kernel that is channels-last, and a permuted batch. clone()
// keeps the strides and lets go of what it was a view of.
class StridedModel final : public RowModel {
 public:
  StridedModel() : RowModel("StridedModel") {
    layer = register_module("layer", Linear(12, 7));
    layer->register_parameter("turned", at::randn({9, 7}).t().clone());
    kernel = register_parameter("kernel", at::randn({5, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
    batched = register_parameter("batched", at::randn({2, 4, 3}).permute({2, 0, 1}).clone());
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor turned = layer->named_parameters()["turned"];
    const at::Tensor image = at::conv2d(x.view({-1, 3, 2, 2}), kernel);
    return at::tanh(layer(x)).mm(turned) + image.flatten(1).narrow(1, 0, 1) + batched.sum({1, 2}).repeat({3});
  }
  Linear layer{nullptr};
  at::Tensor kernel, batched;
};

std::vector<std::vector<std::int64_t>> strides_of(const torch::nn::Module& module) {
  std::vector<std::vector<std::int64_t>> strides;
  for (const at::Tensor& p : module.parameters()) strides.push_back(p.strides().vec());
  return strides;
}

// C30: weights that lie transposed or channels-last in memory. A copy in logical order that is unpacked by strides, or
// the reverse, transposes them in silence. Values equal the reference through steps and both forms of checkpoint, and
// strides stay as they were.
TEST(C30StridedParameters, KeepValuesAndStridesThroughSteps) {
  const auto strides = strides_of(StridedModel());
  ASSERT_EQ(strides.front(), (std::vector<std::int64_t>{2 * 2 * 3, 1, 2 * 3, 3}));
  const TempDir dir;
  for (const bool consolidated : {false, true}) {
    for (const Units& cut : {units<Linear>(), Units{}}) {
      Scenario scenario{.make_model = seeded<StridedModel>(), .units = cut, .optimizer = SGD{.lr = 0.05}};
      scenario.script = [&](Session& session) {
        for (int step = 0; step < 4; ++step) {
          train(session, rows(12, 12, 9, 30 + static_cast<std::uint64_t>(step)), "step " + std::to_string(step));
          EXPECT_EQ(strides_of(session.model()), strides);
          if (step != 1) continue;
          if (consolidated) {
            session.consolidate_and_restart(dir / "model.safetensors");
          } else {
            session.save_and_restart(dir / "runs");
          }
        }
      };
      expect_equals_reference(scenario, all_layouts());
    }
  }
}

// A view of a tensor that nobody else holds is a parameter like any other, and its values are not held twice.
TEST(C30StridedParameters, MayBeViewsOfATensorThatIsGone) {
  struct Turned final : LossModel {
    Turned() : LossModel("Turned") {
      weight = register_parameter("weight", at::randn({9, 12}).t());
      part = register_parameter("part", at::randn({2, 9}).select(0, 1));
    }
    at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
      return at::mse_loss(at::tanh(input.matmul(weight) + part), target);
    }
    at::Tensor weight, part;
  };
  const auto strides = strides_of(*seeded<Turned>()());
  EXPECT_EQ(strides, (std::vector<std::vector<std::int64_t>>{{1, 12}, {1}}));
  Scenario scenario{.make_model = seeded<Turned>(), .units = Units{}, .optimizer = SGD{.lr = 0.05, .momentum = 0.5}};
  scenario.script = [&](Session& session) {
    for (int step = 0; step < 3; ++step) {
      train(session, rows(12, 12, 9, 30 + static_cast<std::uint64_t>(step)), "step " + std::to_string(step));
      EXPECT_EQ(strides_of(session.model()), strides);
    }
  };
  expect_equals_reference(scenario, all_layouts());
  run_ranks(2, [](const Context& context) {
    const auto model = in_turn(seeded<Turned>());
    Engine engine = shard(context, model);
    EXPECT_EQ(model->parameters()[0]._base().numel(), 0);
  });
  run_ranks(1, [](const Context& context) {
    const auto model = in_turn(seeded<Turned>());
    const at::Tensor held(model->parameters()[0]._base());
    EXPECT_THROW(shard(context, model), InvalidArgument);
  });
}

// The form on disk is row-major whatever lies in memory: a module of the other layout loads the same values.
TEST(C30StridedParameters, LoadIntoAModuleOfAnotherLayout) {
  struct Weights final : torch::nn::Module {
    explicit Weights(bool turned) : torch::nn::Module("Weights") {
      const at::Tensor values = at::arange(15, at::kFloat).reshape({3, 5});
      const at::Tensor kernel = at::arange(24, at::kFloat).reshape({2, 3, 2, 2});
      weight = register_parameter("weight", turned ? values.t().contiguous().t().clone() : values.clone());
      conv = register_parameter("conv", turned ? kernel.contiguous(at::MemoryFormat::ChannelsLast) : kernel.clone());
    }
    at::Tensor weight, conv;
  };
  for (const int world_size : {1, 2, 3, 4}) {
    for (const bool turned : {false, true}) {
      const TempDir dir;
      run_ranks(world_size, [&](const Context& context) {
        const auto from = std::make_shared<Weights>(turned), to = std::make_shared<Weights>(!turned);
        const Tensors expected = parameters_of(*from);
        Engine source = shard(context, from), target = shard(context, to);
        const auto expect_loaded = [&](const std::string& how) {
          for (const auto& [name, value] : parameters_of(*to)) expect_equal(value, expected.at(name), 0, 0, name + how);
          const at::NoGradGuard no_grad;
          to->weight.zero_();
          to->conv.zero_();
        };
        source.save(dir / "runs");
        source.consolidate(dir / "model.safetensors");
        expect_loaded(" as built");
        ASSERT_EQ(target.resume(dir / "runs"), 0);
        expect_loaded(" from shards");
        target.load_consolidated(dir / "model.safetensors");
        expect_loaded(" from one file");
      });
    }
  }
}

// As in LibTorch's own examples: a Sequential with a functional inside.
class Classifier final : public LossModel {
 public:
  Classifier() : LossModel("Classifier") {
    layers = register_module("layers", Sequential(Linear(2, 16), torch::nn::Functional(at::relu), Linear(16, 2)));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    return at::cross_entropy_loss(layers->forward(input), target);
  }
  Sequential layers{nullptr};
};

// Points above and below a line, with a gap.
Batch separable_points(std::int64_t count) {
  auto generator = at::detail::createCPUGenerator(12);
  const at::Tensor label = at::arange(count, at::kLong).remainder(2);
  at::Tensor points = at::randn({count, 2}, generator);
  points.select(1, 1).copy_(points.select(1, 0) * 0.5 + (label * 2 - 1) * (0.5 + points.select(1, 1).abs()));
  return {points, label};
}

// C85: replicas with no way back to the original train nothing. Two hundred steps on two classes that a line separates:
// the loss falls as the reference's does, and more than 99 of 100 points come out right.
TEST(C85TwoHundredSteps, LearnAsThePlainModelDoes) {
  const Batch whole = separable_points(240);
  Scenario scenario{.make_model = seeded<Classifier>(), .units = units<Linear>(), .optimizer = SGD{.lr = 0.5}};
  scenario.script = [&](Session& session) {
    const Batch batch = session.part(whole);
    for (int step = 0; step < 200; ++step) {
      const at::Tensor loss = session.model().loss(batch.input, batch.target);
      loss.backward();
      if (step % 20 == 0) session.see_loss("step " + std::to_string(step), loss);
      session.step();
    }
    const at::NoGradGuard no_grad;
    const at::Tensor hits = session.model_as<Classifier>().layers->forward(whole.input).argmax(1).eq(whole.target);
    EXPECT_GT(hits.to(at::kFloat).mean().item<double>(), 0.99);
    session.see("hits", hits.to(at::kFloat));
  };
  expect_equals_reference(scenario, all_layouts());
}

Sequential named_pair() {
  at::manual_seed(7);
  return Sequential({{"A", torch::nn::AnyModule(Linear(4, 6))}, {"B", torch::nn::AnyModule(Linear(6, 4))}});
}

std::vector<std::string> keys_of(const torch::nn::Module& module) {
  std::vector<std::string> keys;
  for (const auto& item : module.named_parameters()) keys.push_back(item.key());
  return keys;
}

// What was saved from `from` is loaded into `to` by name, or is refused with both sets of names, `to` left as it is.
void expect_load_by_name(int world_size, const std::function<Sequential()>& from,
                         const std::function<Sequential()>& to) {
  const TempDir dir;
  run_ranks(world_size, [&](const Context& context) {
    const Sequential source = in_turn(from), target = in_turn(to);
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& p : source->parameters()) p.add_(1);
    }
    const Tensors saved = parameters_of(*source), before = parameters_of(*target);
    Engine source_engine = shard(context, source), target_engine = shard(context, target);
    source_engine.save(dir / "runs");
    source_engine.consolidate(dir / "model.safetensors");
    const std::vector<std::function<void()>> loads{[&] { target_engine.resume(dir / "runs"); },
                                                   [&] { target_engine.load_consolidated(dir / "model.safetensors"); }};
    for (const auto& load : loads) {
      if (keys_of(*source) == keys_of(*target)) {
        load();
        for (const auto& [name, value] : parameters_of(*target)) expect_equal(value, saved.at(name), 0, 0, name);
        continue;
      }
      const std::string text = text_of<CheckpointError>(load);
      for (const auto& key : keys_of(*source)) EXPECT_THAT(text, HasSubstr(key));
      for (const auto& key : keys_of(*target)) EXPECT_THAT(text, HasSubstr(key));
      for (const auto& [name, value] : parameters_of(*target)) expect_equal(value, before.at(name), 0, 0, name);
    }
  });
}

// C86: clone() of a Sequential drops the names of its children in some versions of LibTorch, so that keys change. What
// was saved from a clone is loaded into the original's type by name, or refused with both sets of names; by position
// would put numbers where they do not belong.
TEST(C86ClonedSequential, IsLoadedByNameOrRefusedWithBothSets) {
  const auto cloned = [] {
    return Sequential(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(named_pair()->clone()));
  };
  const auto numbered = [] {
    at::manual_seed(8);
    return Sequential(Linear(4, 6), Linear(6, 4));
  };
  ASSERT_EQ(keys_of(*numbered()), (std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias"}));
  for (const int world_size : {1, 2, 3}) {
    expect_load_by_name(world_size, cloned, named_pair);
    expect_load_by_name(world_size, named_pair, cloned);
    expect_load_by_name(world_size, numbered, named_pair);
    expect_load_by_name(world_size, named_pair, numbered);
  }
}

// One layer under two names, and both in use. The gradient of each element is 1.
class TwiceNamed final : public LossModel {
 public:
  TwiceNamed() : LossModel("TwiceNamed") {
    a = register_module("a", Linear(5, 3));
    b = register_module("b", a);
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor&) override {
    return (a->weight.sum() + a->bias.sum() + b->weight.sum() + b->bias.sum()) * input.mean() / 2;
  }
  Linear a{nullptr}, b{nullptr};
};

// C87: a child registered under two names stands twice in LibTorch's list of parameters, and both entries get a shard
// and a step. The weight moves by lr once, memory counts it once, and the file loads into the plain module.
TEST(C87ChildUnderTwoNames, IsHeldSteppedAndSavedOnce) {
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(name_of(layout));
    const TempDir dir;
    run_ranks(layout.world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const auto model = in_turn([] { return std::make_shared<TwiceNamed>(); });
      Engine engine = shard(context, model, options_of(layout, units<Linear>()));
      Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
      std::int64_t numel = 0;
      for (const UnitPlan& unit : engine.plan().units) numel += unit.numel;
      EXPECT_EQ(numel, 5 * 3 + 3);
      const Tensors start = parameters_of(*model);
      model->loss(at::ones({2}), {}).backward();
      optimizer.step();
      const Tensors end = parameters_of(*model);
      for (const auto& [name, value] : end) expect_equal(value, start.at(name) - 0.1, 1e-6, 0, name);
      engine.consolidate(dir / "model.safetensors");
      const auto plain = in_turn([] { return std::make_shared<TwiceNamed>(); });
      std::vector<ShardView> views;
      for (const auto& [name, p] :
           {std::pair<std::string, at::Tensor>{"a.weight", plain->a->weight}, {"a.bias", plain->a->bias}}) {
        views.push_back({.name = name,
                         .shape = p.sizes().vec(),
                         .strides = p.strides().vec(),
                         .end = p.numel(),
                         .data = static_cast<std::byte*>(p.mutable_data_ptr())});
      }
      read_consolidated(dir / "model.safetensors", views, {{"b.weight", "a.weight"}, {"b.bias", "a.bias"}});
      for (const auto& [name, value] : parameters_of(*plain)) expect_equal(value, end.at(name), 0, 0, name);
    });
  }
}

template <class Module>
concept Shardable = requires(const Context& context, Module module) {
  shard(context, module);
};

// C89: a script module has parameters() too, but is no nn module: train() and zero_grad are other functions, and its
// graph has its own references to weights. It is refused by the compiler.
TEST(C89ScriptModule, IsRefusedWhenTheProgramIsCompiled) {
  EXPECT_TRUE(Shardable<Sequential>);
  EXPECT_TRUE(Shardable<std::shared_ptr<TwiceNamed>>);
  EXPECT_FALSE(Shardable<torch::jit::Module>);
  EXPECT_FALSE(Shardable<std::shared_ptr<torch::jit::Module>>);
}

// A script over weights that an nn module registers: operators are operators, wherever they come from.
class ScriptedModel final : public RowModel {
 public:
  ScriptedModel() : RowModel("ScriptedModel"), script_("script") {
    weight = register_parameter("weight", at::randn({6, 6}));
    fc = register_module("fc", Linear(6, 6));
    script_.register_parameter("weight", weight, /*is_buffer=*/false);
    script_.define("def forward(self, x):\n    return torch.tanh(torch.matmul(x, self.weight))\n");
  }
  at::Tensor forward(const at::Tensor& x) override { return fc(script_.forward({x}).toTensor()); }
  at::Tensor weight;
  Linear fc{nullptr};

 private:
  torch::jit::Module script_;
};

TEST(C89ScriptModule, MayRunOnTheWeightsOfAModule) {
  Scenario scenario{.make_model = seeded<ScriptedModel>(), .units = units<Linear>()};
  scenario.script = [](Session& session) {
    for (int step = 0; step < 4; ++step)
      train(session, rows(12, 6, 6, 30 + static_cast<std::uint64_t>(step)), "step " + std::to_string(step));
  };
  expect_equals_reference(scenario, all_layouts());
}

}  // namespace
}  // namespace fsdp::testing
