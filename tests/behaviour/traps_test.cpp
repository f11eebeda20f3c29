// What is known to break parameters that page themselves in and out: writes, replaced storage, stale views. Each is
// right or is refused with the parameter's name, before a wrong number can be read.
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/serialize.h>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr std::int64_t kWidth = FunctionModel::kWidth;

double train_once(LossModel& model, const Batch& batch) {
  const at::Tensor loss = model.loss(batch.input, batch.target);
  loss.backward();
  return loss.item<double>();
}

struct Act {
  const char* name;
  std::function<void(FunctionModel&)> act;
};
void PrintTo(const Act& act, std::ostream* out) { *out << act.name; }
const auto kName = [](const ::testing::TestParamInfo<Act>& tested) { return std::string(tested.param.name); };

std::vector<at::Tensor> detached_parameters(const FunctionModel& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : model.parameters()) result.push_back(p.detach());
  return result;
}

// Before each of three steps the parameters are written, on every rank alike.
class WriteTest : public ::testing::TestWithParam<Act> {};

TEST_P(WriteTest, SurvivesOnEveryRankAndInLaterSteps) {
  Training training = function_training();
  training.run_step = [](LossModel& model, const Batch& batch) {
    {
      const at::NoGradGuard no_grad;
      GetParam().act(dynamic_cast<FunctionModel&>(model));
    }
    return train_once(model, batch);
  };
  expect_parity(training);
}

const Act kWrites[] = {
    {"FillZeroAndCopy",
     [](FunctionModel& m) {
       m.a->bias.fill_(0.25);
       m.b->bias.zero_();
       m.w.copy_(at::eye(kWidth));
     }},
    {"Init",
     [](FunctionModel& m) {
       torch::nn::init::constant_(m.b->bias, 0.5);
       torch::nn::init::eye_(m.b->weight);
       torch::nn::init::ones_(m.a->bias);
     }},
    {"ClampMulAndArithmetic",
     [](FunctionModel& m) {
       m.w.clamp_(-0.1, 0.1);
       m.b->weight.mul_(0.5);
       m.a->weight.add_(m.a->weight, 0.25);
       m.w += 0.125;
     }},
    {"ThroughViews",
     [](FunctionModel& m) {
       m.w[0].fill_(0.5);
       m.w.select(0, 1).mul_(2);
       m.b->weight.t().narrow(0, 3, 2).zero_();
       m.w.data()[3].fill_(0.125);
       m.a->weight.detach().view({-1}).narrow(0, 7, 100).copy_(at::linspace(0, 1, 100));
     }},
    {"IndexPutMaskedAndScatter",
     [](FunctionModel& m) {
       m.w.index_put_({at::tensor({2, 15}, at::kLong)}, at::full({2, kWidth}, 0.25));
       m.b->weight.masked_fill_(m.b->weight < 0, 0.1);
       m.a->bias.index_fill_(0, at::tensor({1, 47}, at::kLong), 0.75);
     }},
    {"OutVariants",
     [](FunctionModel& m) {
       at::Tensor w = m.w.detach(), weight = m.b->weight.detach();
       at::mm_out(w, m.b->weight, m.b->weight);
       at::cat_out(weight, {w.narrow(0, 8, 8), w.narrow(0, 0, 8)});
       at::sum_out(m.b->bias, m.b->weight, at::IntArrayRef{0});
     }},
    {"ForeachOverAllUnits",
     [](FunctionModel& m) {
       const std::vector<at::Tensor> p = detached_parameters(m);
       std::vector<at::Tensor> ones;
       for (const at::Tensor& parameter : p) ones.push_back(at::ones_like(parameter));
       at::_foreach_mul_(p, 0.5);
       at::_foreach_add_(p, ones, 0.01);
       const std::vector<at::Tensor> norms = at::_foreach_norm(p);
       at::_foreach_div_(p, norms);
     }},
    {"FusedOptimizerStep",
     [](FunctionModel& m) {
       const std::vector<at::Tensor> p = detached_parameters(m);
       std::vector<at::Tensor> gradients, first, second, steps;
       for (const at::Tensor& parameter : p) {
         gradients.push_back(at::ones_like(parameter));
         first.push_back(at::zeros_like(parameter));
         second.push_back(at::zeros_like(parameter));
         steps.push_back(at::ones({}));
       }
       at::_fused_adamw_(p, gradients, first, second, {}, steps, 1e-2, 0.9, 0.999, 0.01, 1e-8, false, false);
     }},
};
INSTANTIATE_TEST_SUITE_P(Traps, WriteTest, ::testing::ValuesIn(kWrites), kName);

TEST(RandomInitTest, IsTheSameOnEveryRankThoughEachDrawsItsOwn) {
  for (const int world_size : {2, 3}) {
    run_ranks(world_size, [](const Context& context) {
      const auto model = std::make_shared<FunctionModel>(plain_function);
      const Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
      const at::NoGradGuard no_grad;
      torch::nn::init::normal_(model->a->weight, 3.0, 1.0);
      // The very next operator sees what the shards hold, not what this rank drew.
      const double drawn = model->a->weight.sum().item<double>();
      EXPECT_EQ(drawn, context.mean(drawn));
      EXPECT_NEAR(drawn / static_cast<double>(model->a->weight.numel()), 3.0, 0.5);
      torch::nn::init::xavier_uniform_(model->w);
      const double uniform = model->w.sum().item<double>();
      EXPECT_EQ(uniform, context.mean(uniform));
    });
  }
}

// The look-up writes the rows that it is about to read.
class BoundedEmbedding final : public LossModel {
 public:
  BoundedEmbedding() : LossModel("BoundedEmbedding") {
    embedding = register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 6).max_norm(0.5)));
    head = register_module("head", torch::nn::Linear(6, 6));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    return at::mse_loss(head(embedding(input)), target);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear head{nullptr};
};

Training bounded_training(const at::Tensor& indices) {
  Training training;
  training.make_model = [] {
    at::manual_seed(5);
    return std::make_shared<BoundedEmbedding>();
  };
  training.batch = [indices](int step) {
    auto generator = at::detail::createCPUGenerator(40 + static_cast<std::uint64_t>(step));
    return Batch{(indices + step) % 8, at::randn({indices.size(0), 6}, generator)};
  };
  training.steps = 3;
  training.own_kernels = true;
  training.options.units = units<torch::nn::Embedding, torch::nn::Linear>();
  return training;
}

TEST(EmbeddingMaxNormTest, SurvivesOnEveryRankAndInLaterSteps) {
  expect_parity(bounded_training(at::tensor({1, 5, 7, 5}, at::kLong).repeat({6})));
}

// No rank looks up all the rows that the batch holds, nor those that it owns.
TEST(EmbeddingMaxNormTest, SurvivesThoughEachRankLooksUpOtherRows) {
  expect_parity(bounded_training(at::tensor({6, 6, 7, 6, 7, 7, 0, 1, 1, 0, 0, 1}, at::kLong)));
}

// What would give a parameter other storage or another shape is refused on the spot; the run goes on as if it had not
// been tried.
class RefusedOnTheSpotTest : public ::testing::TestWithParam<Act> {};

TEST_P(RefusedOnTheSpotTest, NamesTheParameterAndLeavesTheRunAlone) {
  Training training = function_training();
  training.run_step = [](LossModel& model, const Batch& batch) {
    auto& m = dynamic_cast<FunctionModel&>(model);
    if (is_sharded(m)) {
      const at::NoGradGuard no_grad;
      EXPECT_THAT(text_of<InvalidArgument>([&] { GetParam().act(m); }),
                  AllOf(HasSubstr("parameter b.weight"), HasSubstr("refused")));
    }
    return train_once(model, batch);
  };
  expect_parity(training);
}

const Act kRefused[] = {
    {"Set",
     [](FunctionModel& m) {
       m.b->weight.set_(at::ones({kWidth, kWidth}));
     }},
    {"SetOfAStorage",
     [](FunctionModel& m) {
       m.b->weight.set_(at::ones({kWidth * kWidth}).storage(), 0, {kWidth, kWidth}, {kWidth, 1});
     }},
    {"SetAnotherTensorToTheParameter", [](FunctionModel& m) { at::empty({0}).set_(m.b->weight.detach()); }},
    {"Resize",
     [](FunctionModel& m) {
       m.b->weight.resize_({kWidth, 2 * kWidth});
     }},
    {"ResizeAs", [](FunctionModel& m) { m.b->weight.detach().resize_as_(at::ones({3})); }},
    {"TransposeInPlace", [](FunctionModel& m) { m.b->weight.detach().t_(); }},
};
INSTANTIATE_TEST_SUITE_P(Traps, RefusedOnTheSpotTest, ::testing::ValuesIn(kRefused), kName);

// What changes a parameter behind the dispatcher's back is found before that step changes anything.
class RefusedByTheNextStepTest : public ::testing::TestWithParam<Act> {};

TEST_P(RefusedByTheNextStepTest, NamesTheParameter) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Context& context) {
      const auto model = std::make_shared<FunctionModel>(plain_function);
      Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
      Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
      train_once(*model, function_batch(0));
      optimizer.step();
      const std::string text = text_of<InvalidArgument>([&] {
        GetParam().act(*model);
        const Batch batch = function_batch(1);
        model->loss(batch.input.to(model->w.scalar_type()), batch.target.to(model->w.scalar_type())).backward();
      });
      EXPECT_THAT(text, AnyOf(HasSubstr("parameter b.weight"), HasSubstr("parameter w of unit (root)")));
      EXPECT_EQ(engine.step(), 1);
    });
  }
}

struct ForeignHook final : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable&) override {}
};

const Act kChangedBehind[] = {
    {"TorchLoad",
     [](FunctionModel& m) {
       std::stringstream stream;
       torch::save(torch::nn::Linear(kWidth, kWidth), stream);
       torch::load(m.b, stream);
     }},
    {"SetData",
     [](FunctionModel& m) {
       m.b->weight.set_data(at::ones({kWidth, kWidth}));
     }},
    {"ModuleToDouble", [](FunctionModel& m) { m.to(at::kDouble); }},
    {"ReplacedHook",
     [](FunctionModel& m) {
       torch::autograd::impl::set_post_acc_grad_hooks(m.b->weight, std::make_unique<ForeignHook>());
     }},
    {"RemovedHook", [](FunctionModel& m) { torch::autograd::impl::set_post_acc_grad_hooks(m.b->weight, nullptr); }},
    {"OutVariantThatResizes",
     [](FunctionModel& m) {
       const at::NoGradGuard no_grad;
       at::mm_out(m.b->weight, at::ones({8, kWidth}), at::ones({kWidth, kWidth}));
     }},
    {"OutVariantThatGrows",
     [](FunctionModel& m) {
       const at::NoGradGuard no_grad;  // LibTorch gives it the new shape and then fails to grow its storage
       EXPECT_ANY_THROW(at::mm_out(m.b->weight, at::ones({2 * kWidth, kWidth}), at::ones({kWidth, kWidth})));
     }},
    {"Metadata",
     [](FunctionModel& m) {
       m.b->weight.unsafeGetTensorImpl()->set_sizes_contiguous({2, 8, kWidth});
     }},
};
INSTANTIATE_TEST_SUITE_P(Traps, RefusedByTheNextStepTest, ::testing::ValuesIn(kChangedBehind), kName);

// What cannot be sharded is refused by shard() itself, on every rank.
struct Unfit {
  const char* name;
  std::function<at::Tensor(FunctionModel&)>
      add;  // registers a parameter "tried"; what it returns is held over the call of shard()
};
void PrintTo(const Unfit& unfit, std::ostream* out) { *out << unfit.name; }

class RefusedByShardTest : public ::testing::TestWithParam<Unfit> {};

TEST_P(RefusedByShardTest, NamesTheParameter) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Context& context) {
      const auto model = std::make_shared<FunctionModel>(plain_function);
      const at::Tensor held = GetParam().add(*model);
      EXPECT_THAT(text_of<InvalidArgument>([&] {
                    shard(context, model, {.units = units_named({"a", "b"})});
                  }),
                  HasSubstr("parameter tried"));
    });
  }
}

const Unfit kUnfit[] = {
    {"HeldView",
     [](FunctionModel& m) {
       return m.register_parameter("tried", at::ones({4, 4})).view({16});
     }},
    {"HeldDetachedCopy",
     [](FunctionModel& m) {
       return m.register_parameter("tried", at::ones({4, 4})).detach();
     }},
    {"TiedAsAView",
     [](FunctionModel& m) {
       return m.register_parameter("tried", m.w.detach().view({kWidth * kWidth})), at::Tensor();
     }},
    {"OverlappingItself",
     [](FunctionModel& m) {
       return m.register_parameter("tried", at::ones({4, 1}).expand({4, 4})), at::Tensor();
     }},
    {"WithHoles",
     [](FunctionModel& m) {
       return m.register_parameter("tried", at::ones({4, 8}).narrow(1, 0, 4)), at::Tensor();
     }},
    {"Sparse",
     [](FunctionModel& m) {
       return m.register_parameter("tried", at::ones({4, 4}).to_sparse()), at::Tensor();
     }},
    {"WithAGradient",
     [](FunctionModel& m) {
       m.register_parameter("tried", at::ones({4, 4})).mutable_grad() = at::ones({4, 4});
       return at::Tensor();
     }},
    {"Complex",
     [](FunctionModel& m) {
       return m.register_parameter("tried", at::ones({4, 4}, at::kComplexFloat)), at::Tensor();
     }},
    {"WithAHook",
     [](FunctionModel& m) {
       torch::autograd::impl::set_post_acc_grad_hooks(m.register_parameter("tried", at::ones({4, 4})),
                                                      std::make_unique<ForeignHook>());
       return at::Tensor();
     }},
    {"OnAnotherDevice",
     [](FunctionModel& m) {
       return m.register_parameter("tried", at::ones({4, 4}, at::kMeta)), at::Tensor();
     }},
};
INSTANTIATE_TEST_SUITE_P(Traps, RefusedByShardTest, ::testing::ValuesIn(kUnfit),
                         [](const ::testing::TestParamInfo<Unfit>& tested) { return std::string(tested.param.name); });

TEST(SecondEngineTest, OfOneModuleIsRefusedAndTheFirstGoesOn) {
  run_ranks(2, [](const Context& context) {
    const auto model = std::make_shared<FunctionModel>(plain_function);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
    EXPECT_THAT(text_of<InvalidArgument>([&] {
                  shard(context, model, {.units = units_named({"a", "b"})});
                }),
                HasSubstr("is sharded already"));
    train_once(*model, function_batch(0));
    EXPECT_GT(optimizer.step().grad_norm, 0);
  });
}

TEST(FrozenParameterTest, ThatIsMadeTrainableAfterwardsIsRefusedByName) {
  run_ranks(2, [](const Context& context) {
    const auto model = std::make_shared<FunctionModel>(plain_function);
    model->b->weight.requires_grad_(false);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    model->b->weight.requires_grad_(true);
    EXPECT_THAT(text_of<InvalidArgument>([&] { train_once(*model, function_batch(0)); }),
                AllOf(HasSubstr("parameter b.weight"), HasSubstr("requires_grad")));
  });
}

}  // namespace
}  // namespace fsdp::testing
