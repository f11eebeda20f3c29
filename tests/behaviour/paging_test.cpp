// What a program may do with a parameter: every use finds it resident and gives the bits of plain LibTorch.
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
       return plain_function(m, x) + x * m.w.data()[0] + x * m.w.variable_data()[1] + x * m.w.tensor_data()[2] +
              x * at::alias(m.w)[3];
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
       return plain_function(m, x) + x * m.w.diagonal() + x.mm(m.w.as_strided({kWidth, kWidth}, {1, kWidth})) +
              x.mm(m.b->weight.flip(0)) + x * m.w.unfold(0, 4, 4).sum() + x.mm(at::rot90(m.w)) +
              x.mm(m.w.permute({1, 0}));
     }},
    {"ComplexAndReinterpretedViews",
     [](FunctionModel& m, const at::Tensor& x) {
       const at::Tensor complex = at::view_as_complex(m.w.view({kWidth, 8, 2}));
       return plain_function(m, x) + at::view_as_real(complex * complex.conj()).sum() +
              m.w.detach().view(at::kInt).to(at::kFloat).sum() * 1e-9;
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
       return x.mm(stacked[0]) + x.mm(stacked[1]) + at::linear(x, joined.narrow(0, 20, kWidth)) +
              m.a(x).narrow(1, 1, kWidth) + m.b(x);
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
       const at::Tensor rows = torch::nn::functional::embedding(
           indices({0, 1, 2, 0}), m.w, torch::nn::functional::EmbeddingFuncOptions().padding_idx(0));
       return plain_function(m, x) + rows.sum(0);
     }},
    {"ScalarReads",
     [](FunctionModel& m, const at::Tensor& x) {
       const double read = m.w[0][0].item<double>() + static_cast<double>(at::equal(m.w, m.w)) +
                           static_cast<double>(at::allclose(m.w, m.b->weight));
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
     [](FunctionModel& m, const at::Tensor& x) {
       return plain_function(m, x) + MatmulThatSaves::apply(x, m.w) + MatmulThatSaves::apply(x, m.b->weight);
     }},
    {"FunctionsThatKeepTensors",
     [](FunctionModel& m, const at::Tensor& x) {
       return plain_function(m, x) + MatmulThatKeepsTensors::apply(x, m.b->weight);
     }},
    {"TensorHooksThatReadAnotherUnit",
     [](FunctionModel& m, const at::Tensor& x) {
       const at::Tensor hidden = m.a(x);
       hidden.register_hook([&m](const at::Tensor& gradient) { return gradient * (1 + m.b->weight.detach().sum()); });
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

// Each thread's operators pin what they use, so neither takes a unit away from the other.
TEST(BackwardTest, MayRunOnTwoThreadsOfOneModelAtOnce) {
  const auto gradients_of_two_threads = [](FunctionModel& model) {
    std::vector<std::vector<at::Tensor>> gradients(2);
    {
      std::vector<std::jthread> threads;
      for (std::size_t i = 0; i < 2; ++i) {
        threads.emplace_back([&, i] {
          at::set_num_threads(1);
          const Batch batch = function_batch(static_cast<int>(i));
          for (int round = 0; round < 30; ++round) {
            gradients[i] = torch::autograd::grad({model.loss(batch.input, batch.target)}, model.parameters());
          }
        });
      }
    }
    return gradients;
  };
  const auto make = [] { return std::dynamic_pointer_cast<FunctionModel>(function_training().make_model()); };
  const auto expected = gradients_of_two_threads(*make());
  run_ranks(1, [&](const Context& context) {
    const auto model = make();
    const Engine engine = shard(context, model, function_training().options);
    const auto actual = gradients_of_two_threads(*model);
    for (std::size_t i = 0; i < 2; ++i) {
      for (std::size_t p = 0; p < expected[i].size(); ++p) {
        expect_equal(actual[i][p], expected[i][p], 0, 0,
                     "gradient " + std::to_string(p) + " of thread " + std::to_string(i));
      }
    }
  });
}

// Two backward() calls at once: their gradients add up, whichever thread packs, publishes or restarts a round. On one
// rank the sum of two has the same bits in either order; several ranks may pair their rounds in another way.
TEST(BackwardTest, MayAccumulateFromTwoThreadsAtOnce) {
  constexpr int kSteps = 10;
  const auto train = [](const Context& context, bool at_once) {
    const auto model = in_turn(function_training().make_model);
    Engine engine = shard(context, model, function_training().options);
    Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
    for (int step = 0; step < kSteps; ++step) {
      std::vector<at::Tensor> losses;
      for (int i = 0; i < 2; ++i) {
        const Batch batch = part_of(function_batch(2 * step + i), context.rank(), context.world_size());
        losses.push_back(model->loss(batch.input, batch.target));
      }
      std::vector<std::jthread> threads;
      for (const at::Tensor& loss : losses) {
        threads.emplace_back([&loss] {
          at::set_num_threads(1);
          loss.backward();
        });
        if (!at_once) threads.back().join();
      }
      threads.clear();
      optimizer.step();
    }
    return parameters_of(*model);
  };
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const Tensors expected = train(context, /*at_once=*/false), actual = train(context, /*at_once=*/true);
      const double tolerance = world_size == 1 ? 0 : 1e-6;
      for (const auto& [name, value] : expected) expect_equal(actual.at(name), value, tolerance, tolerance, name);
    });
  }
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
    const at::Tensor by_input = torch::autograd::grad({loss * input.size(0)}, {input}, {}, true,
                                                      /*create_graph=*/true)[0];
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
    for (const at::Tensor& gradient :
         torch::autograd::grad({loss}, model.parameters(), {}, true, /*create_graph=*/true)) {
      penalty = penalty.defined() ? penalty + gradient.square().sum() : gradient.square().sum();
    }
    penalty.backward();
    return penalty.item<double>();
  };
  expect_bit_equal(train_sharded(training, 1), train_plain(training));
}

}  // namespace
}  // namespace fsdp::testing
