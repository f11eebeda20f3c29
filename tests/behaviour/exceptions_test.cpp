// Exceptions thrown anywhere in a step: the error surfaces, nothing stays pinned, and after zero_grad the engine goes
// on as if the step had not been tried.
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"
#include "tests/behaviour/reentrant.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kWidth = FunctionModel::kWidth;
constexpr const char* kThrown = "thrown by the program";

struct ThrowingBackward final : torch::autograd::Function<ThrowingBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error(kThrown);
  }
};

[[noreturn]] at::Tensor throw_it() { throw std::runtime_error(kThrown); }

struct Failure {
  const char* name;
  const char* text;
  FunctionModel::Function function;  // fails in forward or backward
};
void PrintTo(const Failure& failure, std::ostream* out) { *out << failure.name; }

const Failure kFailures[] = {
    {"InForwardBetweenUnits", kThrown,
     [](FunctionModel& m, const at::Tensor& x) { return m.b(m.a(x).narrow(1, 0, kWidth)) + throw_it(); }},
    {"InTheFirstOperator", "mat1 and mat2",
     [](FunctionModel& m, const at::Tensor& x) { return m.a(x.narrow(1, 0, 5)); }},
    {"InAnOperatorOfTwoUnits", "Sizes of tensors must match",
     [](FunctionModel& m, const at::Tensor& x) {
       return x.mm(at::cat({m.w, m.a->bias.view({3, kWidth}).narrow(1, 0, 2)}));
     }},
    {"InAWrite", "must match",
     [](FunctionModel& m, const at::Tensor& x) {
       const at::NoGradGuard no_grad;
       m.w.copy_(at::ones({3, 5}));
       return x;
     }},
    {"InATensorHook", kThrown,
     [](FunctionModel& m, const at::Tensor& x) {
       const at::Tensor hidden = m.a(x);
       hidden.register_hook([](const at::Tensor&) { return throw_it(); });
       return m.b(hidden.narrow(1, 0, kWidth)).mm(m.w);
     }},
    {"InACustomBackward", kThrown,
     [](FunctionModel& m, const at::Tensor& x) {
       return m.b(ThrowingBackward::apply(m.a(x).narrow(1, 0, kWidth))).mm(m.w);
     }},
    {"InRecomputation", kThrown,
     [](FunctionModel& m, const at::Tensor& x) {
       int calls = 0;
       const at::Tensor hidden = m.a(x).narrow(1, 0, kWidth);
       return recomputed(
                  [&m, calls](const at::Tensor& in) mutable { return ++calls == 1 ? m.b(in) : m.b(in) + throw_it(); },
                  hidden)
           .mm(m.w);
     }},
    {"InBackwardOfARecomputedBlock", kThrown,
     [](FunctionModel& m, const at::Tensor& x) {
       const at::Tensor hidden = m.a(x).narrow(1, 0, kWidth);
       return recomputed(
                  [&m](const at::Tensor& in) {
                    return m.b(at::GradMode::is_enabled() ? ThrowingBackward::apply(in) : in);
                  },
                  hidden)
           .mm(m.w);
     }},
};

class ExceptionTest : public ::testing::TestWithParam<Failure> {};

// Steps 1 and 3 are tried and fail first, on every rank; then the same step runs and must equal the reference.
TEST_P(ExceptionTest, SurfacesAndTheNextStepsEqualTheReference) {
  Training training = function_training();
  training.steps = 5;
  const Trace plain = train_plain(training);
  for (const int world_size : {1, 2, 3}) {
    int failing_steps = 0;
    Trace trace;
    run_ranks(world_size, [&](const Context& context) {
      at::set_num_threads(1);
      bool fails = false;
      const auto model = in_turn([&fails] {
        at::manual_seed(5);
        return std::make_shared<FunctionModel>([&fails](FunctionModel& m, const at::Tensor& x) {
          return fails ? GetParam().function(m, x) : plain_function(m, x);
        });
      });
      Engine engine = shard(context, model, training.options);
      Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
      for (int step = 0; step < training.steps; ++step) {
        const Batch batch = part_of(training.batch(step), context.rank(), world_size);
        if (step % 2 == 1) {
          fails = true;
          EXPECT_THAT(text_of<std::exception>([&] { model->loss(batch.input, batch.target).backward(); }),
                      HasSubstr(GetParam().text));
          fails = false;
          optimizer.zero_grad();
          if (context.is_main()) ++failing_steps;
        }
        const at::Tensor loss = model->loss(batch.input, batch.target);
        loss.backward();
        const double mean_loss = context.mean(loss.item<double>());
        const Tensors gradients = assemble(context, engine.gradient_views());
        optimizer.step();  // would refuse a unit that is still pinned
        EXPECT_EQ(engine.memory().resident_bytes, 0U);
        EXPECT_EQ(engine.memory().held_gradient_bytes, 0U);
        if (!context.is_main()) continue;
        trace.losses.push_back(mean_loss);
        trace.gradients.push_back(gradients);
      }
      const Tensors parameters = parameters_of(*model);
      if (context.is_main()) trace.parameters = parameters;
    });
    EXPECT_EQ(failing_steps, 2);
    expect_same(trace, plain);
  }
}

INSTANTIATE_TEST_SUITE_P(Places, ExceptionTest, ::testing::ValuesIn(kFailures),
                         [](const ::testing::TestParamInfo<Failure>& tested) {
                           return std::string(tested.param.name);
                         });

// One rank alone fails and leaves: the others' waits end with its reason.
TEST(ExceptionOnOneRankTest, EndsTheOthersStepWithItsText) {
  for (const int world_size : {2, 3}) {
    std::vector<std::string> texts(static_cast<std::size_t>(world_size));
    const std::string first = text_of<std::runtime_error>([&] {
      run_ranks(world_size,
                [&](const Context& context) {
                  const auto model = std::make_shared<FunctionModel>(plain_function);
                  Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
                  Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
                  const Batch batch = function_batch(0);
                  texts[static_cast<std::size_t>(context.rank())] = text_of<CommunicationError>([&] {
                    model->loss(batch.input, batch.target).backward();
                    if (context.rank() == 1) throw_it();
                    optimizer.step();
                  });
                },
                {.timeout = std::chrono::seconds(10)});
    });
    EXPECT_THAT(first, HasSubstr(kThrown));
    for (int rank = 0; rank < world_size; ++rank) {
      if (rank == 1) continue;
      EXPECT_THAT(texts[static_cast<std::size_t>(rank)], HasSubstr(kThrown));
    }
  }
}

// A rank that skips a step that failed must do it on all ranks: calls that do not match are named.
TEST(ExceptionOnOneRankTest, ThatSkipsTheStepIsNamedByTheOthers) {
  run_ranks(2,
            [](const Context& context) {
              const auto model = std::make_shared<FunctionModel>(plain_function);
              Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
              Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
              const Batch batch = function_batch(0);
              model->loss(batch.input, batch.target).backward();
              const std::string text = text_of<CommunicationError>([&] {
                if (context.rank() == 1)
                  optimizer.zero_grad();
                else
                  optimizer.step();
              });
              EXPECT_THAT(text, ::testing::AllOf(HasSubstr("Optimizer::zero_grad"), HasSubstr("Optimizer::step"),
                                                 HasSubstr("rank 1")));
            },
            {.timeout = std::chrono::seconds(10)});
}

}  // namespace
}  // namespace fsdp::testing
