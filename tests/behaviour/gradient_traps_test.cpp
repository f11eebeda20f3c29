// Gradients that are sharded look like gradients: what a program does to them by itself is right or refused by name.
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "tests/behaviour/function_model.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor loss_of(LossModel& model, int step) {
  const Batch batch = function_batch(step);
  return model.loss(batch.input, batch.target);
}

// One rank's model, engine and optimizer.
struct Sharded {
  explicit Sharded(const Context& context,
                   std::shared_ptr<LossModel> the_model = std::make_shared<FunctionModel>(plain_function))
      : model(std::move(the_model)),
        engine(shard(context, model, {.units = units<torch::nn::Linear, torch::nn::Embedding>()})),
        optimizer(engine.optimizer(SGD{.lr = 0.1})) {}
  void train(int step) {
    loss_of(*model, step).backward();
    optimizer.step();
  }
  std::shared_ptr<LossModel> model;
  Engine engine;
  Optimizer optimizer;
};

struct Use {
  const char* name;
  std::function<void(LossModel&)> use;
};
void PrintTo(const Use& use, std::ostream* out) { *out << use.name; }

class ShardedGradientTest : public ::testing::TestWithParam<Use> {};

TEST_P(ShardedGradientTest, IsRefusedByNameAndTheStepStillCounts) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Context& context) {
      Sharded tried(context), untried(context, std::make_shared<FunctionModel>(plain_function));
      {
        const at::NoGradGuard no_grad;
        const auto from = tried.model->parameters(), to = untried.model->parameters();
        for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
      }
      loss_of(*tried.model, 0).backward();
      EXPECT_THAT(text_of<std::exception>([&] { GetParam().use(*tried.model); }),
                  AllOf(HasSubstr("gradients are sharded"), HasSubstr("fsdp::Optimizer::step"), HasSubstr("w")));
      tried.optimizer.step();
      untried.train(0);
      for (const auto& [name, value] : parameters_of(*tried.model))
        expect_equal(value, parameters_of(*untried.model).at(name), 0, 0, name);
    });
  }
}

const Use kUses[] = {
    {"ClipGradNorm", [](LossModel& m) { torch::nn::utils::clip_grad_norm_(m.parameters(), 1.0); }},
    {"ClipGradValue", [](LossModel& m) { torch::nn::utils::clip_grad_value_(m.parameters(), 1.0); }},
    {"TorchSgd", [](LossModel& m) { torch::optim::SGD(m.parameters(), torch::optim::SGDOptions(0.1)).step(); }},
    {"TorchSgdWithMomentum",
     [](LossModel& m) {
       torch::optim::SGD(m.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1)).step();
     }},
    // Its weight decay would scale the first parameter before it looks at the gradient.
    {"TorchAdamW",
     [](LossModel& m) { torch::optim::AdamW(m.parameters(), torch::optim::AdamWOptions(0.1).weight_decay(0)).step(); }},
    {"Read", [](LossModel& m) { m.parameters()[0].grad().abs().sum(); }},
    {"ReadRaw", [](LossModel& m) { m.parameters()[0].grad().const_data_ptr<float>(); }},
    {"Clone", [](LossModel& m) { m.parameters()[0].grad().clone(); }},
    {"Scale", [](LossModel& m) { m.parameters()[0].mutable_grad().mul_(2); }},
    {"AddByHand", [](LossModel& m) { m.parameters()[0].mutable_grad().add_(at::ones_like(m.parameters()[0])); }},
};
INSTANTIATE_TEST_SUITE_P(Traps, ShardedGradientTest, ::testing::ValuesIn(kUses),
                         [](const ::testing::TestParamInfo<Use>& tested) { return std::string(tested.param.name); });

class SparseEmbedding final : public LossModel {
 public:
  SparseEmbedding() : LossModel("SparseEmbedding") {
    embedding = register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true)));
  }
  at::Tensor loss(const at::Tensor&, const at::Tensor&) override {
    return embedding(at::tensor({1, 2}, at::kLong)).square().sum();
  }
  torch::nn::Embedding embedding{nullptr};
};

TEST(SparseGradientTest, IsRefusedByName) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Context& context) {
      Sharded sharded(context, std::make_shared<SparseEmbedding>());
      EXPECT_THAT(text_of<InvalidArgument>([&] { loss_of(*sharded.model, 0).backward(); }),
                  AllOf(HasSubstr("sparse gradient"), HasSubstr("embedding.weight"), HasSubstr("sparse(false)")));
    });
  }
}

TEST(BackwardWithCreateGraphTest, IsRefusedByNameAndTheEngineGoesOn) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Context& context) {
      Sharded sharded(context);
      EXPECT_THAT(
          text_of<InvalidArgument>([&] { loss_of(*sharded.model, 0).backward({}, true, /*create_graph=*/true); }),
          AllOf(HasSubstr("create_graph"), HasSubstr("parameter"), HasSubstr("torch::autograd::grad")));
      sharded.optimizer.zero_grad();
      sharded.train(0);
      EXPECT_EQ(sharded.engine.step(), 1);
    });
  }
}

TEST(GraphKeptAcrossAStepTest, ThrowsAsPlainLibTorchDoes) {
  const std::string expected = "modified by an inplace operation";
  {
    FunctionModel plain(plain_function);
    const at::Tensor kept = loss_of(plain, 0);
    const at::NoGradGuard
        no_grad;  // an update in place; torch::optim's own goes through data(), which versions do not see
    for (const at::Tensor& p : plain.parameters()) p.mul_(0.5);
    ASSERT_THAT(text_of<std::exception>([&] { kept.backward(); }), HasSubstr(expected));
  }
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](const Context& context) {
      Sharded sharded(context);
      const at::Tensor kept = loss_of(*sharded.model, 0);
      sharded.train(1);
      EXPECT_THAT(text_of<std::exception>([&] { kept.backward(); }), HasSubstr(expected));
    });
  }
}

TEST(GraphKeptAcrossAResumeTest, ThrowsSinceTheValuesItSavedAreGone) {
  const TempDir dir;
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](const Context& context) {
      const std::filesystem::path run = dir / std::to_string(world_size);
      Sharded sharded(context);
      sharded.train(0);
      sharded.engine.save(run);
      sharded.train(1);
      const at::Tensor kept = loss_of(*sharded.model, 2);
      ASSERT_EQ(sharded.engine.resume(run), 1);
      EXPECT_THAT(text_of<std::exception>([&] { kept.backward(); }), HasSubstr("modified by an inplace operation"));
      sharded.train(1);
    });
  }
}

// Absent parameters: raw reads throw our text with the unit's name, views can still be made.
TEST(AbsentParameterTest, ThrowsOurTextToRawReadersAndStillMakesViews) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Context& context) {
      Sharded sharded(context);
      sharded.train(0);  // after a step nothing is resident
      auto& m = dynamic_cast<FunctionModel&>(*sharded.model);
      const auto absent = AllOf(HasSubstr("parameters of unit b are sharded and not resident"), HasSubstr("clone()"));
      EXPECT_THAT(text_of<std::exception>([&] { m.b->weight.data_ptr<float>(); }), absent);
      EXPECT_THAT(text_of<std::exception>([&] { m.b->weight.const_data_ptr<float>(); }), absent);
      EXPECT_THAT(text_of<std::exception>([&] { m.b->weight.accessor<float, 2>(); }), absent);
      const at::NoGradGuard no_grad;
      const at::Tensor views[] = {m.b->weight.t(),
                                  m.b->weight.view({-1}),
                                  m.b->weight.narrow(0, 3, 4),
                                  m.b->weight.chunk(2)[1],
                                  m.b->weight.detach(),
                                  m.b->weight.expand({2, 16, 16}),
                                  m.b->weight.as_strided({4}, {2}),
                                  m.b->weight.unfold(0, 2, 2),
                                  m.b->weight[1]};
      for (const at::Tensor& view : views)
        EXPECT_THAT(text_of<std::exception>([&] { view.data_ptr<float>(); }), absent);
      EXPECT_EQ(sharded.engine.memory().resident_bytes, 0U) << "making views must gather nothing";
      EXPECT_TRUE(at::equal(views[0].t(), m.b->weight));
      EXPECT_EQ(views[2].sum().item<float>(), m.b->weight.narrow(0, 3, 4).sum().item<float>());
    });
  }
}

TEST(AbsentParameterTest, IsRefusedByTorchSaveRatherThanWrittenAsGarbage) {
  run_ranks(1, [](const Context& context) {
    Sharded sharded(context);
    sharded.train(0);
    std::ostringstream stream;
    const std::shared_ptr<torch::nn::Module> module = sharded.model;
    EXPECT_THAT(text_of<std::exception>([&] { torch::save(module, stream); }), HasSubstr("sharded and not resident"));
  });
}

TEST(EngineThatIsGoneTest, MakesItsParametersThrow) {
  run_ranks(2, [](const Context& context) {
    const auto model = std::make_shared<FunctionModel>(plain_function);
    at::Tensor kept;
    {
      const Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
      kept = loss_of(*model, 0);
    }
    EXPECT_THAT(text_of<InvalidArgument>([&] { model->w.sum(); }), HasSubstr("engine of this parameter is gone"));
    EXPECT_THAT(text_of<std::exception>([&] { model->w.data_ptr<float>(); }),
                HasSubstr("engine of this parameter is gone"));
    EXPECT_THAT(text_of<std::exception>([&] { kept.backward(); }), HasSubstr("engine of this parameter is gone"));
  });
}

}  // namespace
}  // namespace fsdp::testing
