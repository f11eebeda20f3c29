// What is changed after fsdp::shard, or between steps: buffers, frozen marks, registered parameters, adapters' files.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include "tests/behaviour/function_model.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void run_backward(FunctionModel& model, int step, const Context& context) {
  const Batch batch = part_of(function_batch(step), context.rank(), context.world_size());
  model.loss(batch.input, batch.target).backward();
}

TEST(BufferTest, IsRankZerosAtTheStartAndEachRanksOwnLater) {
  run_ranks(3, [](const Context& context) {
    torch::nn::BatchNorm1d norm(8);
    torch::nn::Sequential model(in_turn([] { return torch::nn::Linear(4, 8); }), norm);
    norm->running_mean.fill_(context.rank() + 5);
    norm->register_buffer("strided", (at::arange(6, at::kFloat) + context.rank()).reshape({2, 3}).t());
    const Engine engine = shard(context, model, {.units = units<torch::nn::Linear>()});
    expect_equal(norm->running_mean, at::full({8}, 5.0F), 0, 0, "running_mean");
    expect_equal(norm->named_buffers()["strided"], at::arange(6, at::kFloat).reshape({2, 3}).t(), 0, 0, "strided");
    EXPECT_EQ(norm->num_batches_tracked.scalar_type(), at::kLong);
    model->forward(at::full({2, 4}, static_cast<float>(context.rank())));
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 1);
  });
}

TEST(BufferTest, OfAnotherShapeOnSomeRankIsRefused) {
  run_ranks(2, [](const Context& context) {
    const auto model = in_turn(make_plain_model);
    model->register_buffer("table", at::ones({4 + context.rank()}));
    EXPECT_THAT(text_of<InvalidArgument>([&] { shard(context, model, {}); }), HasSubstr("rank 1"));
  });
}

// A parameter trained at fsdp::shard may be frozen for a while: it is left alone, decay included, and goes on later.
TEST(RequiresGradTest, MayBeTakenAwayAndGivenBackBetweenSteps) {
  for (const Strategy strategy : {Strategy::kFullShard, Strategy::kReplicate}) {
    run_ranks(2, [strategy](const Context& context) {
      at::set_num_threads(1);
      const auto model = in_turn(make_plain_model), plain = in_turn(make_plain_model);
      Engine engine = shard(context, model, {.units = units_named({"a", "b"}), .strategy = strategy});
      Optimizer optimizer = engine.optimizer(SGD{.lr = 0.5, .weight_decay = 0.1});
      for (int step = 0; step < 6; ++step) {
        const bool frozen = step == 2 || step == 3;
        model->b->weight.requires_grad_(!frozen);
        plain->b->weight.requires_grad_(!frozen);
        run_backward(*model, step, context);
        optimizer.step();
        const Batch whole = function_batch(step);
        plain->loss(whole.input, whole.target).backward();
        const at::NoGradGuard no_grad;
        for (at::Tensor& p : plain->parameters()) {
          if (p.grad().defined()) p.sub_(p.grad() + 0.1 * p, 0.5);
          p.mutable_grad().reset();
        }
      }
      const Tensors expected = parameters_of(*plain);
      for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, expected.at(name), 2e-6, 2e-5, name);
    });
  }
}

TEST(LateParameterTest, IsRefusedByNameBeforeItTrainsUnnoticed) {
  run_ranks(2, [](const Context& context) {
    const TempDir dir;
    const auto model = in_turn(make_plain_model);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    model->b->register_parameter("late", at::ones({3}));
    EXPECT_THAT(text_of<InvalidArgument>([&] { run_backward(*model, 0, context); }),
                AllOf(HasSubstr("b.late"), HasSubstr("after fsdp::shard")));
    EXPECT_THAT(text_of<InvalidArgument>([&] { engine.save(dir / "run"); }), HasSubstr("b.late"));
  });
}

// A frozen base is not written, not asked for, and stays as it is.
TEST(AdapterTest, AreSavedAndLoadedWithoutTheirFrozenBase) {
  const TempDir dir;
  const auto make_frozen = [] {
    const auto model = make_plain_model();
    for (at::Tensor& p : model->a->parameters()) p.requires_grad_(false);
    model->b->bias.requires_grad_(false);
    return model;
  };
  Tensors saved;
  run_ranks(2, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = in_turn(make_frozen);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
    for (int step = 0; step < 2; ++step) {
      run_backward(*model, step, context);
      optimizer.step();
    }
    engine.save(dir / "run", {.trainable_only = true});
    engine.consolidate(dir / "adapter.safetensors", {.trainable_only = true});
    const Tensors values = parameters_of(*model);
    if (context.is_main()) saved = values;
  });
  // b.weight and w, after a page of header; a.weight alone would be half as much again.
  EXPECT_LE(std::filesystem::file_size(dir / "adapter.safetensors"), 4096 + 2 * 16 * 16 * sizeof(float));
  run_ranks(3, [&](const Context& context) {
    const auto resumed = in_turn(make_frozen), loaded = in_turn(make_frozen);
    {
      const at::NoGradGuard no_grad;
      resumed->a->weight.fill_(3);  // another base
    }
    Engine engine = shard(context, resumed, {.units = units_named({"a", "b"})});
    engine.optimizer(AdamW{});
    EXPECT_THROW(engine.resume(dir / "run"), CheckpointError);
    ASSERT_EQ(engine.resume(dir / "run", {.trainable_only = true}), 2);
    Engine other = shard(context, loaded, {.units = units_named({"a", "b"})});
    EXPECT_THROW(other.load_consolidated(dir / "adapter.safetensors"), CheckpointError);
    other.load_consolidated(dir / "adapter.safetensors", {.trainable_only = true});
    const Tensors from_shards = parameters_of(*resumed), from_file = parameters_of(*loaded);
    for (const std::string name : {"b.weight", "w"}) {
      expect_equal(from_shards.at(name), saved.at(name), 0, 0, name);
      expect_equal(from_file.at(name), saved.at(name), 0, 0, name);
    }
    EXPECT_EQ(from_shards.at("a.weight").min().item<double>(), 3);
    expect_equal(from_file.at("a.weight"), saved.at("a.weight"), 0, 0, "a.weight");
  });
}

}  // namespace
}  // namespace fsdp::testing
