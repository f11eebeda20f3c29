// A communicator call of one rank fails, wherever in the step: every rank ends with an error that names rank and
// operation, nobody hangs, and the engine refuses plainly afterwards.
#include <chrono>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr auto kTimeout = std::chrono::seconds(8);
constexpr int kSteps = 3;
constexpr int kFaultyRank = 1;

struct Outcome {
  std::string training;    // the text of the error that ended it; empty = it went through
  std::string afterwards;  // of a forward tried then
  std::string step;        // of a step tried then
};

template <class Body>
std::string error_text(const Body& body) {
  try {
    body();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return {};
}

std::vector<Outcome> train_with(const Fault& fault, int world_size) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(world_size));
  run_ranks(world_size,
            [&](const Context& context) {
              Outcome& outcome = outcomes[static_cast<std::size_t>(context.rank())];
              const auto model = std::make_shared<FunctionModel>(plain_function);
              Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
              Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
              const auto loss = [&](int step) {
                const Batch batch = function_batch(step);
                return model->loss(batch.input, batch.target);
              };
              outcome.training = error_text([&] {
                for (int step = 0; step < kSteps; ++step) {
                  loss(step).backward();
                  optimizer.step();
                }
                context.communicator().barrier();  // a rank that is through waits here for the others
              });
              outcome.afterwards = error_text([&] { loss(kSteps); });
              outcome.step = error_text([&] { optimizer.step(); });
            },
            {.timeout = kTimeout, .faults = {fault}});
  return outcomes;
}

struct FaultCase {
  std::string operation;
  int world_size;
};
void PrintTo(const FaultCase& fault, std::ostream* out) {
  *out << fault.operation << " at " << fault.world_size << " ranks";
}

class CommunicationFaultTest : public ::testing::TestWithParam<FaultCase> {};

// Matching calls before the first step: of shard() 2 barriers for each of the five parameters and one at the end; one
// all_gather of shard() and one of Engine::optimizer, which compare what they were given.
int calls_before_training(const std::string& operation) {
  return operation == "barrier" ? 11 : operation == "all_gather" ? 2 : 0;
}

// Calls at which it fails; a step makes one barrier, two all_gathers, three reductions and at least three gathers.
std::vector<int> positions(const std::string& operation) {
  return operation == "barrier" ? std::vector{0, 1, 2} : std::vector{0, 1, 2, 3, 5};
}

TEST_P(CommunicationFaultTest, EndsEveryRankWithRankAndOperation) {
  const auto& [operation, world_size] = GetParam();
  for (const int position : positions(operation)) {
    const std::string where = operation + " " + std::to_string(position);
    const auto begin = std::chrono::steady_clock::now();
    const auto outcomes = train_with({.kind = Fault::Kind::kThrow,
                                      .operation = operation,
                                      .rank = kFaultyRank,
                                      .after = calls_before_training(operation) + position},
                                     world_size);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kTimeout)
        << where << ": ended by the timeout, not by the fault";
    for (const Outcome& outcome : outcomes) {
      EXPECT_THAT(outcome.training, AllOf(HasSubstr("injected fault in " + operation), HasSubstr("rank 1"))) << where;
      if (operation == "gather" || operation == "reduce") {
        EXPECT_THAT(outcome.training, AnyOf(HasSubstr("of a"), HasSubstr("of b"), HasSubstr("of (root)"))) << where;
      }
      EXPECT_THAT(outcome.training, HasSubstr("step ")) << where;
      EXPECT_THAT(outcome.afterwards, HasSubstr("injected fault")) << where;
      EXPECT_THAT(outcome.step, HasSubstr("injected fault")) << where;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Operations, CommunicationFaultTest,
                         ::testing::Values(FaultCase{"gather", 2}, FaultCase{"gather", 3}, FaultCase{"reduce", 2},
                                           FaultCase{"reduce", 3}, FaultCase{"all_gather", 2},
                                           FaultCase{"all_gather", 3}, FaultCase{"barrier", 2},
                                           FaultCase{"barrier", 3}),
                         [](const auto& tested) {
                           return tested.param.operation + "At" + std::to_string(tested.param.world_size) + "Ranks";
                         });

TEST(FaultOfAGatherTest, SurfacesAtWorldSizeOneToo) {
  std::string text;
  run_ranks(
      1,
      [&](const Context& context) {
        const auto model = std::make_shared<FunctionModel>(plain_function);
        Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
        text = text_of<CommunicationError>([&] { model->loss(function_batch(0).input, function_batch(0).target); });
      },
      {.timeout = kTimeout, .faults = {{.kind = Fault::Kind::kThrow, .operation = "gather"}}});
  EXPECT_THAT(text, AllOf(HasSubstr("injected fault in gather of a"), HasSubstr("rank 0")));
}

// While the model is being sharded: a rank that fails ends the others too.
TEST(FaultInShardTest, EndsEveryRank) {
  for (const char* operation : {"allocate", "all_gather", "barrier"}) {
    for (const int position : {0, 1}) {
      if (operation == std::string("all_gather") && position > 0) continue;  // shard() makes one
      std::vector<std::string> texts(3);
      EXPECT_THROW(run_ranks(3,
                             [&](const Context& context) {
                               const auto model = std::make_shared<FunctionModel>(plain_function);
                               try {
                                 shard(context, model, {.units = units_named({"a", "b"})});
                               } catch (const Error& error) {
                                 texts[static_cast<std::size_t>(context.rank())] = error.what();
                                 throw;
                               }
                             },
                             {.timeout = kTimeout,
                              .faults = {{.kind = Fault::Kind::kThrow,
                                          .operation = operation,
                                          .rank = kFaultyRank,
                                          .after = position}}}),
                   CommunicationError);
      for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr(std::string("injected fault in ") + operation));
    }
  }
}

// A write to a parameter is collective: a rank that fails in it ends the others' wait.
TEST(FaultInAWriteTest, EndsEveryRankNamingTheOperator) {
  for (const int position : {0, 1}) {  // before and after the write
    std::vector<std::string> texts(2);
    const Fault fault{.kind = Fault::Kind::kThrow,
                      .operation = "barrier",
                      .rank = kFaultyRank,
                      .after = calls_before_training("barrier") + position};
    run_ranks(
        2,
        [&](const Context& context) {
          const auto model = std::make_shared<FunctionModel>(plain_function);
          Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
          const at::NoGradGuard no_grad;
          texts[static_cast<std::size_t>(context.rank())] = text_of<CommunicationError>([&] { model->w.fill_(1); });
          EXPECT_NE(error_text([&] { model->w.sum(); }), "");
        },
        {.timeout = kTimeout, .faults = {fault}});
    EXPECT_THAT(texts[0], AllOf(HasSubstr("injected fault in barrier"), HasSubstr("aten::fill_"), HasSubstr("rank 1")));
    EXPECT_THAT(texts[1], AllOf(HasSubstr("injected fault in barrier"), HasSubstr("rank 1")));
  }
}

}  // namespace
}  // namespace fsdp::testing
