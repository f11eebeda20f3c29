// What a program may do with a parameter: every use finds it resident and gives the bits of plain LibTorch.
#include <mutex>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/nn/functional/embedding.h>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

constexpr std::int64_t kWidth = FunctionModel::kWidth;

at::Tensor indices(std::vector<std::int64_t> values) { return at::tensor(values, at::kLong); }

// Operators of users' own, which read raw pointers as their kernels do.
at::Tensor scale_columns(const at::Tensor& x, const at::Tensor& scales) {
  const at::Tensor result = at::empty_like(x);
  const float *in = x.const_data_ptr<float>(), *scale = scales.const_data_ptr<float>();
  auto* out = result.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < x.numel(); ++i) out[i] = in[i] * scale[i % scales.numel()];
  return result;
}

TORCH_LIBRARY(fsdp_paging_test, library) {
  library.def("scale_columns(Tensor x, Tensor scales) -> Tensor", &scale_columns);
  library.def("scale_columns_cpu(Tensor x, Tensor scales) -> Tensor");
  library.impl("scale_columns_cpu", c10::DispatchKey::CPU, &scale_columns);
}

at::Tensor call_user_operator(const char* name, const at::Tensor& x, const at::Tensor& scales) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>()
      .call(x, scales);
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct MatmulThatSaves final : torch::autograd::Function<MatmulThatSaves> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x.matmul(w.t());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1]), gradients[0].t().matmul(saved[0])};
  }
};

struct MatmulThatKeepsTensors final : torch::autograd::Function<MatmulThatKeepsTensors> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->saved_data["x"] = x;
    context->saved_data["w"] = w;
    return x.matmul(w.t());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor x = context->saved_data["x"].toTensor(), w = context->saved_data["w"].toTensor();
    return {gradients[0].matmul(w), gradients[0].t().matmul(x)};
  }
};

struct UseCase {
  const char* name;
  FunctionModel::Function function;
};
void PrintTo(const UseCase& use, std::ostream* out) { *out << use.name; }

class PagingTest : public ::testing::TestWithParam<UseCase> {};

TEST_P(PagingTest, EqualsPlainLibTorch) { expect_parity(function_training(GetParam().function)); }

const UseCase kViews[] = {
    {"ViewExpandReshapeTranspose",
     [](FunctionModel& m, const at::Tensor& x) {
       return x.matmul(m.w.view({4, 4, kWidth}).reshape({kWidth, kWidth}).t()) + m.b->bias.expand({x.size(0), kWidth}) +
              x * m.b->bias.unsqueeze(0).expand({x.size(0), kWidth}) + m.a(x).narrow(1, 0, kWidth);
     }},
    {"ContiguousDetachAndNoOpTo",
     [](FunctionModel& m, const at::Tensor& x) {
       return x.mm(m.w.contiguous()) * m.w.contiguous()[0] + x * m.w.detach()[1] + x * m.w.to(at::kFloat)[2] +
              x.mm(m.b->weight.to(at::kDouble).to(at::kFloat)) + m.a(x).narrow(1, 0, kWidth);
     }},
    {"DataVariableDataAndAlias",
     [](FunctionModel& m, const at::Tensor& x) {
       return plain_function(m, x) + x * m.w.data()[0] + x * m.w.variable_data()[1] + x * m.w.tensor_data()[2] + x * at::alias(m.w)[3];
     }},
    {"ChunkSplitUnbindSelectNarrowIndex",
     [](FunctionModel& m, const at::Tensor& x) {
       const auto chunks = m.a->weight.chunk(3), parts = m.a->weight.split(kWidth);
       return at::linear(x, chunks[0]) + at::linear(x, parts[1]) + x * m.w.unbind(0)[3] + x * m.w[0] +
              at::linear(x, m.a->weight.narrow(0, 5, kWidth)) + x * m.w.index({indices({1, 3, 5})})[1] +
              x.mm(at::cat(at::tensor_split(m.b->weight, 4, 0))) + m.b->bias + m.a->bias.narrow(0, 2, kWidth);
     }},
    {"DiagonalAsStridedFlipUnfoldRot90",
     [](FunctionModel& m, const at::Tensor& x) {
       return plain_function(m, x) + x * m.w.diagonal() + x.mm(m.w.as_strided({kWidth, kWidth}, {1, kWidth})) + x.mm(m.b->weight.flip(0)) +
              x * m.w.unfold(0, 4, 4).sum() + x.mm(at::rot90(m.w)) + x.mm(m.w.permute({1, 0}));
     }},
    {"ComplexAndReinterpretedViews",
     [](FunctionModel& m, const at::Tensor& x) {
       const at::Tensor complex = at::view_as_complex(m.w.view({kWidth, 8, 2}));
       return plain_function(m, x) + at::view_as_real(complex * complex.conj()).sum() + m.w.detach().view(at::kInt).to(at::kFloat).sum() * 1e-9;
     }},
    {"ViewsMadeWithoutGradUsedWithIt",
     [](FunctionModel& m, const at::Tensor& x) {
       at::Tensor row, chunk;
       {
         const at::NoGradGuard no_grad;
         row = m.w[1];
         chunk = m.a->weight.chunk(3)[1];
       }
       return plain_function(m, x) + x * row + at::linear(x, chunk);
     }},
    {"ViewsMadeInInferenceMode",
     [](FunctionModel& m, const at::Tensor& x) {
       at::Tensor sum;
       {
         const c10::InferenceMode inference;
         sum = m.w.unbind(0)[2].sum() + m.b->weight.t().sum() + m.w.data().clone().sum();
       }
       return plain_function(m, x) + sum.item<double>();
     }},
};

const UseCase kOperators[] = {
    {"StackAndCatOfSeveralUnits",
     [](FunctionModel& m, const at::Tensor& x) {
       const at::Tensor stacked = at::stack({m.w, m.b->weight}), joined = at::cat({m.w, m.b->weight, m.a->weight});
       return x.mm(stacked[0]) + x.mm(stacked[1]) + at::linear(x, joined.narrow(0, 20, kWidth)) + m.a(x).narrow(1, 1, kWidth) + m.b(x);
     }},
    {"EinsumBilinearAddmmBaddbmm",
     [](FunctionModel& m, const at::Tensor& x) {
       return plain_function(m, x) + at::einsum("bi,oi->bo", {x, m.w}) + at::addmm(m.b->bias, x, m.b->weight) +
              at::baddbmm(m.w[0].view({1, 1, kWidth}), x.unsqueeze(0), m.b->weight.unsqueeze(0))[0] +
              at::bilinear(x, x, m.w.view({1, kWidth, kWidth}), {});
     }},
    {"CompositesThatReadData",
     [](FunctionModel& m, const at::Tensor& x) {
       const at::Tensor threshold = at::quantile(m.w.detach().abs(), 0.3);
       return plain_function(m, x) + at::quantile(m.b->weight, 0.5) + x.mm(m.w * (m.w.abs() > threshold)) +
              at::linear(x, at::_weight_norm(m.w, m.b->bias.view({kWidth, 1}) + 2, 0));
     }},
    {"ReductionsMasksAndTopk",
     [](FunctionModel& m, const at::Tensor& x) {
       return plain_function(m, x) + m.w.norm() * 0.1 + at::where(m.w > 0, m.w, m.b->weight).sum() * 0.1 +
              m.w.masked_fill(m.w < 0, 0).sum() * 0.1 + std::get<0>(m.a->weight.topk(3)).sum() * 0.1;
     }},
    {"EmbeddingLookups",
     [](FunctionModel& m, const at::Tensor& x) {
       const at::Tensor rows = torch::nn::functional::embedding(indices({0, 1, 2, 0}), m.w, torch::nn::functional::EmbeddingFuncOptions().padding_idx(0));
       return plain_function(m, x) + rows.sum(0);
     }},
    {"ScalarReads",
     [](FunctionModel& m, const at::Tensor& x) {
       const double read = m.w[0][0].item<double>() + static_cast<double>(at::equal(m.w, m.w)) + static_cast<double>(at::allclose(m.w, m.b->weight));
       return plain_function(m, x) + read;
     }},
    {"UserOperatorsThatReadRawPointers",
     [](FunctionModel& m, const at::Tensor& x) {
       return plain_function(m, x) + call_user_operator("fsdp_paging_test::scale_columns", x, m.b->bias.detach()) +
              call_user_operator("fsdp_paging_test::scale_columns_cpu", x, m.w.detach()[2]);
     }},
};

const UseCase kFunctions[] = {
    {"FunctionsThatSaveParameters",
     [](FunctionModel& m, const at::Tensor& x) { return plain_function(m, x) + MatmulThatSaves::apply(x, m.w) + MatmulThatSaves::apply(x, m.b->weight); }},
    {"FunctionsThatKeepTensors",
     [](FunctionModel& m, const at::Tensor& x) { return plain_function(m, x) + MatmulThatKeepsTensors::apply(x, m.b->weight); }},
    {"TensorHooksThatReadAnotherUnit",
     [](FunctionModel& m, const at::Tensor& x) {
       const at::Tensor hidden = m.a(x);
       hidden.register_hook([&m](const at::Tensor& gradient) { return gradient + m.b->weight.detach().sum() * 1e-3; });
       return m.b(hidden.narrow(1, 0, kWidth)).matmul(m.w);
     }},
};

const auto kName = [](const ::testing::TestParamInfo<UseCase>& tested) { return std::string(tested.param.name); };
INSTANTIATE_TEST_SUITE_P(Views, PagingTest, ::testing::ValuesIn(kViews), kName);
INSTANTIATE_TEST_SUITE_P(Operators, PagingTest, ::testing::ValuesIn(kOperators), kName);
INSTANTIATE_TEST_SUITE_P(Functions, PagingTest, ::testing::ValuesIn(kFunctions), kName);

double loss_of(LossModel& model, const Batch& batch, const std::function<void(const at::Tensor&)>& run_backward) {
  const at::Tensor loss = model.loss(batch.input, batch.target);
  run_backward(loss);
  return loss.item<double>();
}

TEST(BackwardTest, RunsOnAForeignThread) {
  Training training = function_training();
  training.run_step = [](LossModel& model, const Batch& batch) {
    return loss_of(model, batch, [](const at::Tensor& loss) { std::jthread([&] { loss.backward(); }).join(); });
  };
  expect_parity(training);
}

TEST(BackwardTest, RunsHooksThatParametersHadBeforeSharding) {
  Training training = function_training();
  training.make_model = [] {
    at::manual_seed(5);
    auto model = std::make_shared<FunctionModel>(plain_function);
    model->w.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    return model;
  };
  expect_parity(training);
}

TEST(BackwardTest, OverARetainedGraphAccumulates) {
  Training training = function_training();
  training.run_step = [](LossModel& model, const Batch& batch) {
    return loss_of(model, batch, [](const at::Tensor& loss) {
      loss.backward({}, /*retain_graph=*/true);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
    });
  };
  expect_parity(training);
}

// autograd::grad accumulates nothing; its results are full local gradients, as in plain LibTorch.
TEST(AutogradGradTest, EqualsPlainAndLeavesTheStepAlone) {
  Training training = function_training();
  training.run_step = [](LossModel& model, const Batch& batch) {
    const at::Tensor loss = model.loss(batch.input, batch.target);
    const auto gradients = torch::autograd::grad({loss}, model.parameters(), {}, /*retain_graph=*/true);
    double sum = 0;
    for (const at::Tensor& gradient : gradients) sum += gradient.sum().item<double>();
    loss.backward();
    return sum;
  };
  const Trace plain = train_plain(training);
  expect_bit_equal(train_sharded(training, 1), plain);
  expect_same(train_sharded(training, 2), plain);
}

TEST(AutogradGradTest, DoubleBackwardThroughAGradientPenaltyEqualsPlain) {
  Training training = function_training();
  training.run_step = [](LossModel& model, const Batch& batch) {
    const at::Tensor input = batch.input.clone().requires_grad_(true);
    // Per row, so that the penalty is a mean over the batch like the loss.
    const at::Tensor loss = model.loss(input, batch.target);
    const at::Tensor by_input = torch::autograd::grad({loss * input.size(0)}, {input}, {}, true, /*create_graph=*/true)[0];
    const at::Tensor total = loss + by_input.square().sum(1).mean();
    total.backward();
    return total.item<double>();
  };
  expect_parity(training);
}

TEST(AutogradGradTest, DoubleBackwardByParametersEqualsPlainOnOneRank) {
  Training training = function_training();
  training.run_step = [](LossModel& model, const Batch& batch) {
    const at::Tensor loss = model.loss(batch.input, batch.target);
    at::Tensor penalty;
    for (const at::Tensor& gradient : torch::autograd::grad({loss}, model.parameters(), {}, true, /*create_graph=*/true)) {
      penalty = penalty.defined() ? penalty + gradient.square().sum() : gradient.square().sum();
    }
    penalty.backward();
    return penalty.item<double>();
  };
  expect_bit_equal(train_sharded(training, 1), train_plain(training));
}

// A generator and a discriminator, each with its own engine; the generator's loss runs through the discriminator.
struct AdversarialPair {
  void discriminate(const at::Tensor& noise, const at::Tensor& real) const {
    const at::Tensor fake = generator->forward(noise).detach();
    (discriminator->forward(fake).square().mean() + (discriminator->forward(real) - 1).square().mean()).backward();
  }
  void generate(const at::Tensor& noise) const { (discriminator->forward(generator->forward(noise)) - 1).square().mean().backward(); }

  std::shared_ptr<StackModel> generator = std::make_shared<StackModel>(3, kWidth), discriminator = std::make_shared<StackModel>(2, kWidth);
};

Batch noise_and_real(int step) { return function_batch(step + 50); }

void plain_sgd(StackModel& model) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : model.parameters()) p.sub_(0.1 * p.grad());
}

Tensors plain_adversaries(int steps) {
  at::manual_seed(9);
  const AdversarialPair pair;
  for (int step = 0; step < steps; ++step) {
    const Batch batch = noise_and_real(step);
    pair.discriminate(batch.input, batch.target);
    plain_sgd(*pair.discriminator);
    pair.discriminator->zero_grad();
    pair.generate(batch.input);
    plain_sgd(*pair.generator);
    pair.generator->zero_grad();
    pair.discriminator->zero_grad();
  }
  Tensors result = parameters_of(*pair.generator);
  for (const auto& [name, value] : parameters_of(*pair.discriminator)) result["discriminator." + name] = value;
  return result;
}

TEST(TwoEnginesTest, AGanTrainsAsPlainLibTorchDoes) {
  at::set_num_threads(1);
  constexpr int kSteps = 4;
  const Tensors expected = plain_adversaries(kSteps);
  for (const int world_size : {1, 2}) {
    std::mutex building;
    run_ranks(world_size, [&](const Context& context) {
      at::set_num_threads(1);
      std::unique_lock lock(building);
      at::manual_seed(9);
      const AdversarialPair pair;
      lock.unlock();
      const ShardOptions options{.units = units<torch::nn::Linear>()};
      Engine generator = shard(context, pair.generator, options), discriminator = shard(context, pair.discriminator, options);
      Optimizer generator_steps = generator.optimizer(SGD{.lr = 0.1}), discriminator_steps = discriminator.optimizer(SGD{.lr = 0.1});
      for (int step = 0; step < kSteps; ++step) {
        const Batch batch = part_of(noise_and_real(step), context.rank(), world_size);
        pair.discriminate(batch.input, batch.target);
        discriminator_steps.step();
        pair.generate(batch.input);
        generator_steps.step();
        discriminator_steps.zero_grad();
      }
      for (const auto& [name, value] : parameters_of(*pair.generator)) expect_equal(value, expected.at(name), 1e-6, 1e-5, name);
      for (const auto& [name, value] : parameters_of(*pair.discriminator)) {
        expect_equal(value, expected.at("discriminator." + name), 1e-6, 1e-5, "discriminator." + name);
      }
    });
  }
}

// One operator that reads parameters of both engines, and one that copies from the one into the other.
TEST(TwoEnginesTest, OneOperatorMayUseParametersOfBoth) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const auto online = std::make_shared<StackModel>(2, kWidth), target = std::make_shared<StackModel>(2, kWidth);
      const ShardOptions options{.units = units<torch::nn::Linear>()};
      Engine online_engine = shard(context, online, options), target_engine = shard(context, target, options);
      const auto from = online->parameters(), to = target->parameters();
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
      for (std::size_t i = 0; i < from.size(); ++i) {
        EXPECT_TRUE(at::equal(to[i], from[i])) << i;
        EXPECT_EQ((to[i] - from[i]).abs().sum().item<double>(), 0) << i;
        EXPECT_NE(from[i].abs().sum().item<double>(), 0) << i;
      }
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
