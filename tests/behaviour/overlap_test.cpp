// Gathers run under the computation before them. Layers that sleep make computation long; the communicator's records
// tell when each gather began.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/core/custom_class.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

constexpr auto kComputation = std::chrono::milliseconds(20);
constexpr int kLayers = 4, kSteps = 3;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// When the computation of each layer ended, in the order in which it did.
struct Ends final : torch::CustomClassHolder {
  std::vector<std::int64_t> forward, backward;
};

struct SleepInBackward final : torch::autograd::Function<SleepInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const c10::intrusive_ptr<Ends>& ends) {
    context->saved_data["ends"] = c10::IValue::make_capsule(ends);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    std::this_thread::sleep_for(kComputation);
    c10::static_intrusive_pointer_cast<Ends>(context->saved_data["ends"].toCapsule())->backward.push_back(now_ns());
    return {gradients[0], at::Tensor()};
  }
};

// Each layer reads its weights and then computes on for a while, in forward and in backward.
class SlowModel final : public LossModel {
 public:
  explicit SlowModel(c10::intrusive_ptr<Ends> ends) : LossModel("SlowModel"), ends_(std::move(ends)) {
    layers = register_module("layers", torch::nn::ModuleList());
    for (int i = 0; i < kLayers; ++i) layers->push_back(torch::nn::Linear(8, 8));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    at::Tensor x = input;
    for (std::size_t i = 0; i < layers->size(); ++i) {
      x = layers[i]->as<torch::nn::Linear>()->forward(SleepInBackward::apply(x, ends_));
      std::this_thread::sleep_for(kComputation);
      ends_->forward.push_back(now_ns());
    }
    return at::mse_loss(x, target);
  }
  torch::nn::ModuleList layers{nullptr};

 private:
  c10::intrusive_ptr<Ends> ends_;
};

struct Overlapped {
  int forward = 0, backward = 0;
};

// Counts, in the last step, the layers whose gather began while the layer before them (after them, in backward) was
// still computing.
Overlapped overlapped(const std::vector<CommunicatorRecord>& gathers, const Ends& ends) {
  const auto began = [&](int layer, std::int64_t from, std::int64_t to) {
    return std::any_of(gathers.begin(), gathers.end(), [&](const CommunicatorRecord& gather) {
      return gather.label == "layers." + std::to_string(layer) && gather.begin_ns > from && gather.begin_ns < to;
    });
  };
  Overlapped result;
  const std::size_t first = (kSteps - 1) * kLayers;
  std::int64_t from = ends.backward[first - 1];
  for (std::size_t i = 0; i < kLayers; ++i) {
    result.forward += began(static_cast<int>(i) + 1, from, ends.forward[first + i]);
    from = ends.forward[first + i];
  }
  for (std::size_t i = 0; i < kLayers; ++i) {
    result.backward += began(kLayers - 2 - static_cast<int>(i), from, ends.backward[first + i]);
    from = ends.backward[first + i];
  }
  return result;
}

// What rank 0 saw.
Overlapped train_with(int prefetch, int world_size) {
  std::mutex mutex;
  std::vector<CommunicatorRecord> gathers;
  const auto ends = c10::make_intrusive<Ends>();
  run_ranks(world_size,
            [&](const Context& context) {
              const auto model = std::make_shared<SlowModel>(context.is_main() ? ends : c10::make_intrusive<Ends>());
              Engine engine = shard(context, model, {.units = units<torch::nn::Linear>(), .prefetch = prefetch});
              Optimizer optimizer = engine.optimizer(SGD{});
              for (int step = 0; step < kSteps; ++step) {
                model->loss(at::ones({4, 8}).requires_grad_(true), at::zeros({4, 8}))
                    .backward();  // so that the first layer's backward sleeps too
                optimizer.step();
              }
            },
            {.on_record = [&](int rank, const CommunicatorRecord& record) {
              const std::lock_guard lock(mutex);
              if (rank == 0 && record.operation == "gather") gathers.push_back(record);
            }});
  return overlapped(gathers, *ends);
}

class OverlapTest : public ::testing::TestWithParam<int> {};  // world size

TEST_P(OverlapTest, EachGatherBeginsBeforeTheComputationAheadOfItEnds) {
  const Overlapped ahead = train_with(/*prefetch=*/1, GetParam());
  EXPECT_EQ(ahead.forward, kLayers - 1);
  // Forward ends with its last two layers resident, so backward gathers two fewer.
  EXPECT_EQ(ahead.backward, kLayers - 2);
}

TEST_P(OverlapTest, WithoutPrefetchEachGatherWaitsForIt) {
  const Overlapped serial = train_with(/*prefetch=*/0, GetParam());
  EXPECT_EQ(serial.forward, 0);
  EXPECT_EQ(serial.backward, 0);
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, OverlapTest, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace fsdp::testing
