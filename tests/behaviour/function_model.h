// A model whose forward is any function of three units' parameters, so that a test says in one line what is done to
// a parameter.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <ATen/ATen.h>

#include "memory/torch_compat.h"
#include "tests/support/parity.h"

namespace fsdp::testing {

class FunctionModel final : public LossModel {
 public:
  static constexpr std::int64_t kWidth = 16;
  // Maps rows [N, 16] to rows [N, 16].
  using Function = std::function<at::Tensor(FunctionModel&, const at::Tensor&)>;

  explicit FunctionModel(Function function) : LossModel("FunctionModel"), function_(std::move(function)) {
    a = register_module("a", torch::nn::Linear(kWidth, 3 * kWidth));
    b = register_module("b", torch::nn::Linear(kWidth, kWidth));
    w = register_parameter("w", at::randn({kWidth, kWidth}) * 0.3);
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    return at::mse_loss(at::tanh(0.1 * function_(*this, input)),
                        target);  // bounded: runs that diverge cannot be compared
  }

  torch::nn::Linear a{nullptr}, b{nullptr};  // units of their own
  at::Tensor w;                              // of the root unit

 private:
  Function function_;
};

inline bool is_sharded(const FunctionModel& model) { return carries_touch_key(model.w); }

inline constexpr Strategy kStrategies[] = {Strategy::kReplicate, Strategy::kShardOptimizer, Strategy::kShardGradients,
                                           Strategy::kFullShard};

// A use of all three units.
inline at::Tensor plain_function(FunctionModel& model, const at::Tensor& x) {
  return at::tanh(model.b(model.a(x).narrow(1, 5, FunctionModel::kWidth))).matmul(model.w);
}

inline std::shared_ptr<FunctionModel> make_plain_model() {
  at::manual_seed(5);
  return std::make_shared<FunctionModel>(plain_function);
}

inline Batch function_batch(int step) {
  auto generator = at::detail::createCPUGenerator(300 + static_cast<std::uint64_t>(step));
  return {at::randn({12, FunctionModel::kWidth}, generator), at::randn({12, FunctionModel::kWidth}, generator)};
}

inline Training function_training(FunctionModel::Function function = plain_function) {
  Training training;
  training.make_model = [function = std::move(function)] {
    at::manual_seed(5);
    return std::make_shared<FunctionModel>(function);
  };
  training.batch = function_batch;
  training.steps = 3;
  training.own_kernels = true;
  training.options.units = units_named({"a", "b"});
  return training;
}

// One rank gives the bits of plain LibTorch, several its numbers.
inline void expect_parity(const Training& training) {
  const Trace plain = train_plain(training);
  expect_bit_equal(train_sharded(training, 1), plain);
  for (const int world_size : {2, 3}) expect_same(train_sharded(training, world_size), plain);
}

// The text of the E that `body` throws; a failure of the test where it throws none.
template <class E, class Body>
std::string text_of(const Body& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace fsdp::testing
