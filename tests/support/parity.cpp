#include "tests/support/parity.h"

#include <cstring>
#include <set>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "memory/torch_compat.h"
#include "sharding/optimizer_kernels.h"

namespace fsdp::testing {
namespace {

constexpr double kSgdLr = 0.1, kAdamLr = 1e-2;

double run_step(const Training& training, LossModel& model, const Batch& batch) {
  if (training.run_step) return training.run_step(model, batch);
  const at::Tensor loss = model.loss(batch.input, batch.target);
  loss.backward();
  return loss.item<double>();
}

// Each tensor once, under its first name: LibTorch lists a tied one under all of its names.
std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) result.emplace_back(item.key(), item.value());
  }
  return result;
}

// Before any rank's thread starts: one intra-op thread for all, and at::tanh used once. Threads that call it for the
// first time at the same moment get values that are off by 4e-5 in about one process of a hundred, without this library
// too (LibTorch 2.15, MKL's vector mathematics); every later call is exact.
[[maybe_unused]] const bool kWarmedUp = [] {
  at::set_num_threads(1);
  return at::tanh(at::ones({64})).sum().item<double>() > 0;
}();

class PlainOptimizer {
 public:
  virtual ~PlainOptimizer() = default;
  virtual void step() = 0;
};

class TorchOptimizer final : public PlainOptimizer {
 public:
  TorchOptimizer(const torch::nn::Module& module, bool adamw) {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, tensor] : distinct_parameters(module)) tensors.push_back(tensor);
    if (adamw) {
      optimizer_ = std::make_unique<torch::optim::AdamW>(tensors, torch::optim::AdamWOptions(kAdamLr));
    } else {
      optimizer_ = std::make_unique<torch::optim::SGD>(tensors, torch::optim::SGDOptions(kSgdLr));
    }
  }
  void step() override { optimizer_->step(); }

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// Our kernels on whole contiguous tensors.
class KernelOptimizer final : public PlainOptimizer {
 public:
  KernelOptimizer(const torch::nn::Module& module, bool adamw) : adamw_(adamw) {
    for (const auto& [name, p] : distinct_parameters(module))
      states_.push_back({p, at::zeros_like(p), at::zeros_like(p)});
  }
  void step() override {
    const at::NoGradGuard no_grad;
    for (State& s : states_) {
      if (!s.parameter.grad().defined()) continue;
      ++s.steps;
      const at::Tensor gradient = s.parameter.grad().contiguous();
      const auto bytes = [](const at::Tensor& t) { return static_cast<std::byte*>(t.mutable_data_ptr()); };
      const OptimizerSpan span{DType::kFloat32, bytes(s.parameter), bytes(gradient),
                               bytes(s.first),  bytes(s.second),    s.parameter.numel()};
      if (adamw_) {
        adam_update(span,
                    {.lr = kAdamLr, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 1e-2, .step = s.steps});
      } else {
        sgd_update(span, {.lr = kSgdLr, .step = s.steps});
      }
    }
  }

 private:
  struct State {
    at::Tensor parameter, first, second;
    std::int64_t steps = 0;
  };
  bool adamw_;
  std::vector<State> states_;
};

}  // namespace

Training mixed_training() {
  Training training;
  training.make_model = [] {
    at::manual_seed(7);
    return std::make_shared<MixedModel>();
  };
  training.batch = [](int step) { return MixedModel::batch(12, 100 + static_cast<std::uint64_t>(step)); };
  training.options.units = units<Block, torch::nn::LSTM, torch::nn::Conv1d>();
  return training;
}

Trace train_plain(const Training& training) {
  at::set_num_threads(1);
  const auto model = training.make_model();
  std::unique_ptr<PlainOptimizer> optimizer;
  if (training.own_kernels) {
    optimizer = std::make_unique<KernelOptimizer>(*model, training.adamw);
  } else {
    optimizer = std::make_unique<TorchOptimizer>(*model, training.adamw);
  }
  Trace trace;
  for (int step = 0; step < training.steps; ++step) {
    trace.losses.push_back(run_step(training, *model, training.batch(step)));
    Tensors gradients;
    for (const auto& [name, parameter] : distinct_parameters(*model)) {
      if (parameter.grad().defined()) gradients[name] = parameter.grad().clone();
    }
    trace.gradients.push_back(std::move(gradients));
    optimizer->step();
    model->zero_grad();
  }
  trace.parameters = parameters_of(*model);
  return trace;
}

Trace train_rank(const Context& context, const Training& training, const std::shared_ptr<LossModel>& model) {
  at::set_num_threads(1);
  Engine engine = shard(context, model, training.options);
  Optimizer optimizer = training.adamw ? engine.optimizer(AdamW{.lr = kAdamLr}) : engine.optimizer(SGD{.lr = kSgdLr});
  Trace trace;
  for (int step = 0; step < training.steps; ++step) {
    const double loss = context.mean(
        run_step(training, *model, part_of(training.batch(step), context.rank(), context.world_size())));
    const Tensors gradients = assemble(context, engine.gradient_views());
    optimizer.step();
    if (!context.is_main()) continue;
    trace.losses.push_back(loss);
    trace.gradients.push_back(gradients);
  }
  trace.parameters = parameters_of(*model);
  return trace;
}

std::string name_of_backend(const std::string& backend) {
  static const std::map<std::string, std::string> names{{"thread", "Threads"}, {"shm", "Shm"}, {"tcp", "Tcp"}};
  return names.at(backend);
}

std::mutex& drawing_mutex() {
  static std::mutex mutex;
  return mutex;
}

Trace train_sharded(const Training& training, int world_size) {
  Trace trace;
  run_ranks(
      world_size,
      [&](const Context& context) {
        Trace own = train_rank(context, training, in_turn(training.make_model));
        if (context.is_main()) trace = std::move(own);
      },
      training.ranks);
  return trace;
}

void expect_equal(const at::Tensor& actual, const at::Tensor& expected, double absolute, double relative,
                  const std::string& name) {
  ASSERT_TRUE(actual.defined()) << name;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << name;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << name;
  if (absolute == 0 && relative == 0) {
    EXPECT_TRUE(at::equal(actual, expected))
        << name << " differs by up to " << (actual - expected).abs().max().item<double>();
  } else {
    EXPECT_TRUE(at::allclose(actual, expected, relative, absolute))
        << name << " differs by up to " << (actual - expected).abs().max().item<double>();
  }
}

void expect_same(const Trace& actual, const Trace& expected, double absolute, double relative, bool parameters) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    EXPECT_NEAR(actual.losses[step], expected.losses[step], absolute + relative * std::abs(expected.losses[step]))
        << "loss of step " << step;
    ASSERT_EQ(actual.gradients[step].size(), expected.gradients[step].size()) << "step " << step;
    for (const auto& [name, gradient] : expected.gradients[step]) {
      ASSERT_TRUE(actual.gradients[step].count(name)) << name << " has no gradient in step " << step;
      expect_equal(actual.gradients[step].at(name), gradient, absolute, relative,
                   "gradient of " + name + " in step " + std::to_string(step));
    }
  }
  if (!parameters) return;
  ASSERT_EQ(actual.parameters.size(), expected.parameters.size());
  for (const auto& [name, value] : expected.parameters)
    expect_equal(actual.parameters.at(name), value, absolute, relative, name);
}

void expect_bit_equal(const Trace& actual, const Trace& expected) { expect_same(actual, expected, 0, 0); }

Batch part_of(const Batch& batch, int rank, int world_size) {
  const auto part = [&](const at::Tensor& whole) {
    const std::int64_t size = whole.size(0) / world_size;
    return whole.narrow(0, rank * size, size);
  };
  return {part(batch.input), part(batch.target)};
}

Tensors assemble(const Context& context, const std::vector<ShardView>& views) {
  const at::NoGradGuard no_grad;
  Tensors tensors;
  for (const ShardView& view : views) {
    std::int64_t numel = 1;
    for (const std::int64_t size : view.shape) numel *= size;
    // Each rank of one copy puts its range into zeros and the sum over ranks is the whole.
    at::Tensor flat = at::zeros({numel}, to_scalar_type(view.dtype));
    auto* bytes = static_cast<std::byte*>(flat.mutable_data_ptr());
    if (view.end > view.begin && view.replica == 0) {
      std::memcpy(bytes + static_cast<std::size_t>(view.begin) * size_of(view.dtype), view.data,
                  static_cast<std::size_t>(view.end - view.begin) * size_of(view.dtype));
    }
    context.communicator().all_reduce(bytes, numel, view.dtype, ReduceOp::kSum);
    tensors[view.name] = flat.as_strided(view.shape, view.strides).clone();
  }
  return tensors;
}

Tensors parameters_of(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  Tensors tensors;
  for (const auto& item : module.named_parameters()) tensors[item.key()] = item.value().detach().clone();
  return tensors;
}

}  // namespace fsdp::testing
