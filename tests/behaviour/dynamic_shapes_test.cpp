// Batch sizes and sequence lengths that change from step to step: the numbers stay right and the plan stays in use.
#include <cmath>
#include <functional>
#include <map>
#include <mutex>

#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

constexpr std::int64_t kWidth = 16;

// A recurrent unit touches its weights as often as the sequence is long.
class RecurrentModel final : public LossModel {
 public:
  RecurrentModel() : LossModel("RecurrentModel") {
    first = register_module("first", torch::nn::Linear(kWidth, kWidth));
    gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(kWidth, kWidth).num_layers(2).batch_first(true)));
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(kWidth, kWidth).batch_first(true)));
    last = register_module("last", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    const at::Tensor x = std::get<0>(gru(at::tanh(first(input))));
    return at::mse_loss(last(std::get<0>(lstm(x))), target);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::LSTM lstm{nullptr};
};

// Attention and convolution over [N, T, 16].
class SequenceModel final : public LossModel {
 public:
  SequenceModel() : LossModel("SequenceModel") {
    blocks = register_module("blocks", torch::nn::ModuleList(Block(kWidth, 2), Block(kWidth, 2)));
    convolution = register_module("convolution",
                                  torch::nn::Conv1d(torch::nn::Conv1dOptions(kWidth, kWidth, 3).padding(1)));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    const at::Tensor x = blocks[1]->as<Block>()->forward(blocks[0]->as<Block>()->forward(input));
    return at::mse_loss(convolution(x.transpose(1, 2)).transpose(1, 2), target);
  }
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::Conv1d convolution{nullptr};
};

struct Shape {
  std::int64_t batch, time;
};
// Other sequence lengths, a short last batch, one row per rank, and both at once.
constexpr Shape kShapes[] = {{12, 5}, {12, 12}, {6, 12}, {12, 20}, {6, 1}, {12, 5}, {18, 7}};
constexpr int kSteps = static_cast<int>(std::size(kShapes));

Batch batch_of(int step) {
  const Shape shape = kShapes[step];
  auto generator = at::detail::createCPUGenerator(600 + static_cast<std::uint64_t>(step));
  return {at::randn({shape.batch, shape.time, kWidth}, generator),
          at::randn({shape.batch, shape.time, kWidth}, generator)};
}

template <class Model>
class DynamicShapesTest : public ::testing::Test {
 public:
  static Training training() {
    Training training;
    training.make_model = [] {
      at::manual_seed(31);
      return std::make_shared<Model>();
    };
    training.batch = batch_of;
    training.steps = kSteps;
    training.own_kernels = true;
    training.options.units = units<torch::nn::Linear, torch::nn::GRU, torch::nn::LSTM, torch::nn::Conv1d, Block>();
    return training;
  }
  // Trains one rank for kSteps, calls `after_step` after each, and checks that what follows the first step leaves the
  // first step's timeline in place and takes no overflow.
  static void train_on_one_plan(const Context& context, const std::function<void(Model&, int step)>& after_step) {
    at::set_num_threads(1);
    const auto model = std::make_shared<Model>();
    Engine engine = shard(context, model, training().options);
    Optimizer optimizer = engine.optimizer(AdamW{});
    std::vector<std::string> timeline;
    std::int64_t overflows = 0;
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = part_of(batch_of(step), context.rank(), context.world_size());
      model->loss(batch.input, batch.target).backward();
      optimizer.step();
      if (step == 0) {
        timeline = engine.plan().timeline;
        overflows = engine.memory().overflows;
      }
      after_step(*model, step);
      EXPECT_EQ(engine.plan().timeline, timeline) << "step " << step;
      EXPECT_EQ(engine.memory().overflows, overflows) << "step " << step;
    }
  }
};
using Models = ::testing::Types<RecurrentModel, SequenceModel>;
TYPED_TEST_SUITE(DynamicShapesTest, Models);

TYPED_TEST(DynamicShapesTest, StayRight) { expect_parity(this->training()); }

// Where each unit was gathered in one step, in order, as the rank's communicator saw it. Between units the order may
// change: a gather that waits for peers to leave its slot is overtaken.
using GatherLog = std::map<std::string, std::vector<const void*>>;

TYPED_TEST(DynamicShapesTest, KeepThePlanFromTheSecondStepOn) {
  for (const int world_size : {1, 2, 3}) {
    std::mutex mutex;
    std::vector<std::vector<GatherLog>> logs(static_cast<std::size_t>(world_size),
                                             std::vector<GatherLog>(1));  // by rank and step
    const auto on_record = [&](int rank, const CommunicatorRecord& record) {
      if (record.operation != "gather") return;
      const std::lock_guard lock(mutex);
      logs[static_cast<std::size_t>(rank)].back()[record.label].push_back(record.output);
    };
    run_ranks(world_size,
              [&](const Context& context) {
                this->train_on_one_plan(context, [&](TypeParam&, int) {
                  const std::lock_guard lock(mutex);
                  logs[static_cast<std::size_t>(context.rank())].emplace_back();
                });
              },
              {.on_record = on_record});
    for (const auto& steps : logs) {
      ASSERT_GE(steps[1].size(), 4U);
      for (int step = 2; step < kSteps; ++step)
        EXPECT_EQ(steps[static_cast<std::size_t>(step)], steps[1]) << "step " << step;
    }
  }
}

TYPED_TEST(DynamicShapesTest, EvaluationAtOtherShapesBetweenStepsLeavesThePlanAlone) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](const Context& context) {
      this->train_on_one_plan(context, [](TypeParam& model, int step) {
        const at::NoGradGuard no_grad;
        const Batch other = batch_of((step + 3) % kSteps);
        EXPECT_TRUE(std::isfinite(model.loss(other.input, other.target).template item<double>()));
      });
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
