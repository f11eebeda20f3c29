// Sixteen bits: overflow that one rank sees, scales that nobody asked for, buffers, and the way back to full precision.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <fsdp/checkpoint.h>
#include <fsdp/testing.h>

#include "tests/behaviour/function_model.h"
#include "tests/cases/case_support.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

ShardOptions options_of(const Layout& layout, Units cut, const MixedPrecision& precision = {}) {
  return {
      .units = std::move(cut), .strategy = layout.strategy, .shard_group = layout.shard_group, .precision = precision};
}

class OverflowModel final : public RowModel {
 public:
  OverflowModel() : RowModel("OverflowModel") {
    first = register_module("first", Linear(16, 16));
    second = register_module("second", Linear(16, 16));
  }
  at::Tensor forward(const at::Tensor& x) override { return second(at::tanh(first(x))); }
  Linear first{nullptr}, second{nullptr};
};

// Training in which, before each true step, one rank's gradient of one element overflows; none if `element` is below 0.
Tensors train_with_overflows(const Layout& layout, std::int64_t element, int bad_rank) {
  Tensors values;
  run_ranks(layout.world_size, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn(seeded<OverflowModel>());
    auto& layers = dynamic_cast<OverflowModel&>(*model);
    Engine engine = shard(context, model, options_of(layout, units<Linear>()));
    Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1, .momentum = 0.9});
    LossScaler scaler({.initial_scale = 1024});
    const auto loss_of = [&](int step) {
      const Batch whole = rows(12, 16, 16, static_cast<std::uint64_t>(step));
      const Batch batch = part_of(whole, context.rank(), context.world_size());
      return model->loss(batch.input, batch.target);
    };
    for (int step = 0; step < 3; ++step) {
      if (element >= 0) {
        const Tensors before = parameters_of(*model);
        const double scale = scaler.scale();
        at::Tensor loss = loss_of(step);
        if (context.rank() == bad_rank)
          loss = loss + layers.second->weight.view({-1})[element] * std::numeric_limits<float>::infinity();
        scaler.scale(loss).backward();
        const StepResult result = optimizer.step({.max_grad_norm = 1, .scaler = &scaler});
        EXPECT_TRUE(result.skipped) << "rank " << context.rank();
        EXPECT_EQ(result.first_bad_parameter, "second.weight");
        EXPECT_EQ(scaler.scale(), scale / 2);
        for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, before.at(name), 0, 0, name);
      }
      scaler.scale(loss_of(step)).backward();
      EXPECT_FALSE(optimizer.step({.max_grad_norm = 1, .scaler = &scaler}).skipped);
    }
    Tensors own = parameters_of(*model);
    if (context.is_main()) values = std::move(own);
  });
  return values;
}

class C13OverflowInOneShard : public ::testing::TestWithParam<Layout> {};

// C13: an infinite gradient arises on one rank, in an element that one rank owns. If the others do not hear of it some
// step and some skip, and the shards are of two models from then on. All skip, all halve the scale, no weight or
// momentum changes, and the run has the bits of one in which nothing happened.
TEST_P(C13OverflowInOneShard, SkipsTheStepOnEveryRank) {
  const int last = GetParam().world_size - 1;
  const Tensors undisturbed = train_with_overflows(GetParam(), -1, 0);
  for (const auto& [element, bad_rank] : {std::pair{0, 0}, {0, last}, {255, 0}, {255, last}, {100, last}, {140, 0}}) {
    SCOPED_TRACE("element " + std::to_string(element) + " by rank " + std::to_string(bad_rank));
    const Tensors disturbed = train_with_overflows(GetParam(), element, bad_rank);
    // Scales are powers of two and change no bit of a step.
    for (const auto& [name, value] : undisturbed) expect_equal(disturbed.at(name), value, 0, 0, name);
  }
}
INSTANTIATE_TEST_SUITE_P(Grid, C13OverflowInOneShard, ::testing::ValuesIn(all_layouts()),
                         [](const auto& tested) { return name_of(tested.param); });

// Takes its input in the weights' type; the loss is fp32.
class NestedImpl final : public torch::nn::Module {
 public:
  NestedImpl() {
    scale = register_parameter("scale", at::randn({12}) * 0.1 + 1);
    fc = register_module("fc", Linear(12, 12));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(fc(x * scale)); }
  at::Tensor scale;
  Linear fc{nullptr};
};
TORCH_MODULE(Nested);

class CastModel final : public RowModel {
 public:
  CastModel() : RowModel("CastModel") {
    outer = register_module("outer", torch::nn::Sequential(Nested(), Linear(12, 12), Nested()));
    offset = register_parameter("offset", at::randn({12}));
  }
  at::Tensor forward(const at::Tensor& x) override {
    seen.clear();
    at::Tensor h = x.to(offset.scalar_type()) + offset;
    for (auto& layer : *outer) {
      h = layer.any_forward(h).get<at::Tensor>();
      seen.push_back(h.detach().clone());
    }
    return h.to(at::kFloat);
  }
  torch::nn::Sequential outer{nullptr};
  at::Tensor offset;
  std::vector<at::Tensor> seen;  // what each layer of the last forward gave
};

Batch cast_batch(int step) { return rows(12, 12, 12, 70 + static_cast<std::uint64_t>(step)); }

double norm_of_plain_gradient() {
  at::set_num_threads(1);
  const auto model = seeded<CastModel>()();
  const Batch batch = cast_batch(0);
  model->loss(batch.input, batch.target).backward();
  double squares = 0;
  for (const at::Tensor& p : model->parameters()) squares += p.grad().square().sum().item<double>();
  return std::sqrt(squares);
}

// C15: sixteen-bit compute and no loss scaler asked for. A scaler that comes with the type by itself divides gradients
// by a scale that nothing was multiplied with; a zero_grad that hangs on the type or the strategy lets them grow. The
// norm is that of the fp32 reference to 2 per cent, and on each step the same.
TEST(C15NormWithoutAScaler, IsThatOfTheReferenceOnEveryStep) {
  const double norm = norm_of_plain_gradient();
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const Layout& layout : all_layouts()) {
      SCOPED_TRACE(name_of(layout) + c10::toString(type));
      run_ranks(layout.world_size, [&](const Context& context) {
        at::set_num_threads(1);
        const auto model = in_turn(seeded<CastModel>());
        Engine engine = shard(context, model, options_of(layout, units<Linear, Nested>(), {.param = type}));
        Optimizer optimizer = engine.optimizer(AdamW{.lr = 0, .weight_decay = 0});
        std::vector<double> norms;
        for (int step = 0; step < 3; ++step) {
          const Batch batch = part_of(cast_batch(0), context.rank(), context.world_size());
          model->loss(batch.input, batch.target).backward();
          norms.push_back(optimizer.step().grad_norm);
        }
        EXPECT_NEAR(norms[0], norm, (type == at::kFloat ? 1e-5 : 0.02) * norm);
        EXPECT_EQ(norms, std::vector<double>(3, norms[0]));
      });
    }
  }
}

struct Travel {
  MixedPrecision precision;
  double large, small;  // exact in the type that travels
};

// Each rank's gradient is exactly `value` times the number of micro-batches, in the parameters' type.
void expect_exact_gradients(const Layout& layout, const Travel& travel, int micro_batches) {
  run_ranks(layout.world_size, [&](const Context& context) {
    struct Model final : torch::nn::Module {
      Model() : torch::nn::Module("Model") {
        large = register_parameter("large", at::zeros({5}));
        small = register_parameter("small", at::zeros({7}));
      }
      at::Tensor large, small;
    };
    const auto model = std::make_shared<Model>();
    Engine engine = shard(context, model, options_of(layout, {}, travel.precision));
    for (int m = 0; m < micro_batches; ++m) {
      model->large.backward(at::full({5}, travel.large, model->large.scalar_type()));
      model->small.backward(at::full({7}, travel.small, model->small.scalar_type()));
    }
    const Tensors gradients = assemble(context, engine.gradient_views());
    expect_equal(gradients.at("large"), at::full({5}, travel.large * micro_batches, at::kFloat), 0, 0, "large");
    expect_equal(gradients.at("small"), at::full({7}, travel.small * micro_batches, at::kFloat), 0, 0, "small");
  });
}

// C16: fp16 gradients of 40000 on each rank overflow where they are divided after a sum in fp16, and those of 2^-22
// vanish where they are divided before. Both come back exactly, also where four micro-batches add up to more than fp16
// holds.
TEST(C16SixteenBitReduction, NeitherOverflowsNorUnderflows) {
  const double tiny = std::ldexp(1.0, -22);
  const std::vector<Travel> travels{{{.param = at::kHalf}, 40000, tiny},
                                    {{.param = at::kHalf, .reduce = at::kHalf}, 65504, std::ldexp(1.0, -24)},
                                    {{.reduce = at::kHalf}, 40000, tiny},
                                    {{.param = at::kBFloat16, .reduce = at::kBFloat16}, 39936, std::ldexp(1.0, -100)},
                                    {{.reduce = at::kBFloat16}, 39936, tiny}};
  for (const Travel& travel : travels) {
    for (const Layout& layout : all_layouts()) {
      const bool reduces_once = layout.strategy == Strategy::kReplicate || layout.strategy == Strategy::kShardOptimizer;
      if (reduces_once && travel.precision.reduce != at::kFloat) continue;  // refused, below
      SCOPED_TRACE(name_of(layout) + c10::toString(travel.precision.param) + c10::toString(travel.precision.reduce));
      for (const int micro_batches : {1, 4}) expect_exact_gradients(layout, travel, micro_batches);
    }
  }
}

TEST(C16SixteenBitReduction, IsRefusedByNameWhereGradientsAddUpLocally) {
  for (const Strategy strategy : {Strategy::kReplicate, Strategy::kShardOptimizer}) {
    run_ranks(2, [&](const Context& context) {
      const auto model = in_turn(seeded<CastModel>());
      const std::string text = text_of<InvalidArgument>(
          [&] { shard(context, model, {.strategy = strategy, .precision = {.reduce = at::kHalf}}); });
      EXPECT_NE(text.find("precision.reduce"), std::string::npos) << text;
    });
  }
}

// Computes in bf16 around a norm that keeps fp32 weights, as LibTorch's CPU kernels want it.
class BatchNormModel final : public RowModel {
 public:
  BatchNormModel() : RowModel("BatchNormModel") {
    fc = register_module("fc", Linear(6, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    steps = register_buffer("steps", at::zeros({}, at::kLong));
    const at::NoGradGuard no_grad;
    fc->bias.add_(3);  // so that the running mean is far from zero
  }
  at::Tensor forward(const at::Tensor& x) override {
    if (is_training()) steps.add_(1);
    return norm(fc(x.to(fc->weight.scalar_type())).to(at::kFloat));
  }
  Linear fc{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor steps;
};

constexpr int kNormSteps = 300;

Tensors plain_buffers() {
  at::set_num_threads(1);
  const auto model = seeded<BatchNormModel>()();
  const Batch batch = rows(16, 6, 8, 3);
  for (int step = 0; step < kNormSteps; ++step) {
    model->loss(batch.input, batch.target).backward();
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : model->parameters()) p.sub_(p.grad(), 1e-3);
    model->zero_grad();
  }
  Tensors buffers;
  for (const auto& item : model->named_buffers()) buffers[item.key()] = item.value().clone();
  return buffers;
}

// C17: buffers are cast with the weights and kept so: statistics degrade, and a counter in bf16 sticks at 256. Under
// bf16 compute the statistics stay fp32 and the counter int64, and after 300 steps they are those of an fp32 run.
TEST(C17BuffersUnderSixteenBitCompute, KeepTheirTypesAndStatistics) {
  const Tensors expected = plain_buffers();
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(name_of(layout));
    run_ranks(layout.world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const auto model = in_turn(seeded<BatchNormModel>());
      ShardOptions options = options_of(layout, units<Linear, torch::nn::BatchNorm1d>(), {.param = at::kBFloat16});
      options.per_unit = [&](const std::string& unit) -> std::optional<UnitOptions> {
        if (unit != "norm") return std::nullopt;
        return UnitOptions{.strategy = layout.strategy, .shard_group = layout.shard_group};
      };
      Engine engine = shard(context, model, options);
      Optimizer optimizer = engine.optimizer(SGD{.lr = 1e-3});
      // The same rows on every rank: statistics are each rank's own.
      const Batch batch = rows(16, 6, 8, 3);
      for (int step = 0; step < kNormSteps; ++step) {
        model->loss(batch.input, batch.target).backward();
        optimizer.step();
      }
      for (const auto& item : model->named_buffers()) {
        const at::Tensor& wanted = expected.at(item.key());
        const bool is_count = wanted.scalar_type() == at::kLong;
        expect_equal(item.value(), wanted, 0, is_count ? 0 : 1e-2, item.key());
        if (is_count) {
          EXPECT_EQ(item.value().item<std::int64_t>(), kNormSteps) << item.key();
        }
      }
    });
  }
}

void fill(torch::nn::Module& module, const Tensors& values) {
  const at::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) item.value().copy_(values.at(item.key()));
}

std::vector<at::Tensor> evaluate(CastModel& model) {
  const at::NoGradGuard no_grad;
  model.eval();
  std::vector<at::Tensor> layers{model.forward(cast_batch(9).input)};
  layers.insert(layers.end(), model.seen.begin(), model.seen.end());
  return layers;
}

void expect_same_layers(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i)
    expect_equal(found[i], wanted[i], 1e-6, 0, i == 0 ? "output" : "layer " + std::to_string(i - 1));
}

// Reads a consolidated file into a module that no engine knows.
void read_into(torch::nn::Module& module, const std::filesystem::path& file) {
  std::vector<ShardView> views;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& p = item.value();
    views.push_back({.name = item.key(),
                     .dtype = DType::kFloat32,
                     .shape = p.sizes().vec(),
                     .strides = p.strides().vec(),
                     .begin = 0,
                     .end = p.numel(),
                     .data = static_cast<std::byte*>(p.mutable_data_ptr())});
  }
  read_consolidated(file, views);
}

// C18: training computes in 16 bits, evaluation is asked for in full precision, and some units stay in 16 bits all the
// same. The consolidated file holds the fp32 masters of every unit, nested ones too: a plain fp32 module and a second
// engine without mixed precision that read it compute, layer by layer, what a module filled with the masters does.
TEST(C18EvaluationInFullPrecision, UsesTheMastersOfEveryUnit) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    for (const Layout& layout : all_layouts()) {
      SCOPED_TRACE(name_of(layout) + c10::toString(type));
      const TempDir dir;
      run_ranks(layout.world_size, [&](const Context& context) {
        at::set_num_threads(1);
        const auto make = [] { return std::static_pointer_cast<CastModel>(seeded<CastModel>()()); };
        const auto model = in_turn(make), filled = in_turn(make), read = in_turn(make), other = in_turn(make);
        Engine engine = shard(context, model, options_of(layout, units<Linear, Nested>(), {.param = type}));
        Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
        for (int step = 0; step < 3; ++step) {
          const Batch batch = part_of(cast_batch(step), context.rank(), context.world_size());
          model->loss(batch.input, batch.target).backward();
          optimizer.step();
        }
        std::vector<ShardView> views = engine.shard_views();
        std::erase_if(views, [](const ShardView& view) { return view.kind != ShardKind::kParameter; });
        const Tensors masters = assemble(context, views);
        for (const auto& [name, master] : masters)
          EXPECT_FALSE(at::equal(master, master.to(type).to(at::kFloat))) << name << " has no more than 16 bits";
        fill(*filled, masters);
        const auto wanted = evaluate(*filled);
        engine.consolidate(dir / "model.safetensors");
        read_into(*read, dir / "model.safetensors");
        expect_same_layers(evaluate(*read), wanted);
        Engine full = shard(context, other, options_of(layout, units<Linear, Nested>()));
        full.load_consolidated(dir / "model.safetensors");
        expect_same_layers(evaluate(*other), wanted);
        EXPECT_EQ(evaluate(*model)[1].scalar_type(), type);
      });
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
