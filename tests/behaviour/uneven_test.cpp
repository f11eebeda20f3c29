// Ranks with less data than others: averages weighted by samples, steps without a backward, steps that fail together.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>

#include "tests/behaviour/function_model.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<ShardOptions>& strategies() {
  static const std::vector<ShardOptions> options{{},
                                                 {.strategy = Strategy::kReplicate},
                                                 {.strategy = Strategy::kShardOptimizer},
                                                 {.strategy = Strategy::kShardGradients}};
  return options;
}

// Rows [begin, end) of the 12 of a step's batch: rank and micro-batch decide, and the last rank runs out.
std::pair<std::int64_t, std::int64_t> rows_of(int step, int rank, int world_size, int micro) {
  const std::vector<std::int64_t> cuts{0, 1, 4, 6, 11, 12};
  const int part = rank * 2 + micro;
  if (step >= 2 && rank == world_size - 1 && world_size > 1) return {0, 0};
  if (part >= 5) return {0, 0};
  return {cuts[static_cast<std::size_t>(part)], cuts[static_cast<std::size_t>(part) + 1]};
}

TEST(UnevenTest, WeighsEverySampleAlikeWhateverRankAndMicroBatchItIsIn) {
  for (const int world_size : {1, 2, 3, 4}) {
    // Plain LibTorch over all rows that some rank has.
    const auto plain = make_plain_model();
    std::vector<double> norms;
    for (int step = 0; step < 4; ++step) {
      std::vector<at::Tensor> inputs, targets;
      const Batch batch = function_batch(step);
      for (int rank = 0; rank < world_size; ++rank) {
        for (const int micro : {0, 1}) {
          const auto [begin, end] = rows_of(step, rank, world_size, micro);
          inputs.push_back(batch.input.slice(0, begin, end));
          targets.push_back(batch.target.slice(0, begin, end));
        }
      }
      plain->loss(at::cat(inputs), at::cat(targets)).backward();
      const at::NoGradGuard no_grad;
      double squares = 0;
      for (at::Tensor& p : plain->parameters()) {
        squares += p.grad().square().sum().item<double>();
        p.sub_(p.grad(), 0.5);
      }
      norms.push_back(std::sqrt(squares));
      plain->zero_grad();
    }
    const Tensors expected = parameters_of(*plain);
    for (const ShardOptions& base : strategies()) {
      run_ranks(world_size, [&](const Context& context) {
        at::set_num_threads(1);
        const auto model = in_turn(make_plain_model);
        ShardOptions options = base;
        options.units = units_named({"a", "b"});
        Engine engine = shard(context, model, options);
        Optimizer optimizer = engine.optimizer(SGD{.lr = 0.5});
        for (int step = 0; step < 4; ++step) {
          const Batch batch = function_batch(step);
          for (const int micro : {0, 1}) {
            const auto [begin, end] = rows_of(step, context.rank(), world_size, micro);
            if (begin == end) continue;
            const at::Tensor loss = model->loss(batch.input.slice(0, begin, end), batch.target.slice(0, begin, end));
            engine.weigh(loss, static_cast<double>(end - begin)).backward();
          }
          EXPECT_NEAR(optimizer.step().grad_norm, norms[static_cast<std::size_t>(step)], 1e-5);
        }
        for (const auto& [name, value] : parameters_of(*model))
          expect_equal(value, expected.at(name), 2e-6, 2e-5, name);
      });
    }
  }
}

TEST(UnevenTest, RefusesAStepInWhichSomeRanksWeighAndOthersDoNot) {
  run_ranks(3, [](const Context& context) {
    const auto model = in_turn(make_plain_model);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    Optimizer optimizer = engine.optimizer(SGD{});
    const auto backward = [&](bool weighs) {
      const Batch batch = function_batch(0);
      const at::Tensor loss = model->loss(batch.input, batch.target);
      (weighs ? engine.weigh(loss, 12) : loss).backward();
    };
    backward(context.rank() != 1);
    EXPECT_THAT(text_of<InvalidArgument>([&] { optimizer.step(); }), AllOf(HasSubstr("rank 1"), HasSubstr("weigh")));
    optimizer.zero_grad();
    backward(true);
    EXPECT_EQ(engine.step(), 0);
    optimizer.step();
    backward(false);
    optimizer.step();
    EXPECT_EQ(engine.step(), 2);
    EXPECT_THROW(engine.weigh(model->w.sum(), -1), InvalidArgument);
  });
}

// What one rank may throw, and where.
enum class Failure { kBeforeForward, kInForward, kInBackward, kBetweenBackwards, kBeforeStep };

class FailingTogetherTest : public ::testing::TestWithParam<std::tuple<int, int, Failure>> {};

TEST_P(FailingTogetherTest, DropsTheStepOnEveryRankAndGoesOn) {
  const auto [world_size, strategy, failure] = GetParam();
  ShardOptions options = strategies()[static_cast<std::size_t>(strategy)];
  options.units = units_named({"a", "b"});
  run_ranks(world_size,
            [&, failure = failure](const Context& context) {
              at::set_num_threads(1);
              bool fails = false;
              const auto fail_at = [&](Failure place) {
                if (fails && failure == place) throw std::runtime_error("a bad sample");
              };
              const auto model = in_turn([&] {
                at::manual_seed(5);
                return std::make_shared<FunctionModel>([&](FunctionModel& m, const at::Tensor& x) {
                  const at::Tensor hidden = m.a(x).narrow(1, 5, FunctionModel::kWidth);
                  fail_at(Failure::kInForward);
                  at::Tensor y = at::tanh(m.b(hidden));
                  if (y.requires_grad()) {
                    y.register_hook([&](const at::Tensor& gradient) {
                      fail_at(Failure::kInBackward);
                      return gradient;
                    });
                  }
                  return y.matmul(m.w);
                });
              });
              const auto twin = in_turn(make_plain_model);
              Engine engine = shard(context, model, options);
              Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
              std::vector<Tensors> seen;
              for (int step = 0; step < 6; ++step) {
                const bool dropped = step == 1 || step == 3;
                fails = dropped && context.rank() == world_size - 1;
                const Batch batch = part_of(function_batch(dropped ? 9 : step), context.rank(), world_size);
                const Tensors before = parameters_of(*model);
                const auto body = [&] {
                  fail_at(Failure::kBeforeForward);
                  model->loss(batch.input, batch.target).backward();
                  fail_at(Failure::kBetweenBackwards);
                  model->loss(batch.input * 2, batch.target).backward();
                  fail_at(Failure::kBeforeStep);
                  optimizer.step();
                };
                if (!dropped) {
                  engine.attempt(body);
                  continue;
                }
                const std::string text = text_of<StepFailed>([&] { engine.attempt(body); });
                EXPECT_THAT(text,
                            AllOf(HasSubstr("rank " + std::to_string(world_size - 1)), HasSubstr("a bad sample")));
                for (const auto& [name, value] : parameters_of(*model))
                  expect_equal(value, before.at(name), 0, 0, name);
                EXPECT_FALSE(model->w.grad().defined());
                EXPECT_EQ(engine.memory().held_gradient_bytes, 0U);
              }
              EXPECT_EQ(engine.step(), 4);
              // As if the failed steps had never been.
              Engine reference = shard(context, twin, options);
              Optimizer plain = reference.optimizer(AdamW{.lr = 1e-2});
              for (const int step : {0, 2, 4, 5}) {
                const Batch batch = part_of(function_batch(step), context.rank(), world_size);
                twin->loss(batch.input, batch.target).backward();
                twin->loss(batch.input * 2, batch.target).backward();
                plain.step();
              }
              const Tensors expected = parameters_of(*twin);
              for (const auto& [name, value] : parameters_of(*model))
                expect_equal(value, expected.at(name), 1e-7, 1e-6, name);
            },
            {.timeout = std::chrono::seconds(3)});  // a rank that waited longer for the one that failed would throw
}

INSTANTIATE_TEST_SUITE_P(Grid, FailingTogetherTest,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Range(0, 4),
                                            ::testing::Values(Failure::kBeforeForward, Failure::kInForward,
                                                              Failure::kInBackward, Failure::kBetweenBackwards,
                                                              Failure::kBeforeStep)));

// Numbers that are not finite fail every rank alike, and a step that a peer has given up ends zero_grad and the reading
// of gradients too.
TEST(FailingTogetherRulesTest, EndsWhateverTheOthersComeTo) {
  run_ranks(3, [](const Context& context) {
    const auto model = in_turn(make_plain_model);
    Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
    Optimizer optimizer = engine.optimizer(SGD{});
    const Batch batch = function_batch(0);
    for (const int what : {0, 1}) {
      EXPECT_THAT(text_of<StepFailed>([&] {
                    engine.attempt([&] {
                      model->loss(batch.input, batch.target).backward();
                      if (context.rank() == 1) throw std::bad_alloc();
                      if (what == 0) engine.gradient_views();
                      if (what == 1) optimizer.zero_grad();
                    });
                  }),
                  HasSubstr("rank 1"));
    }
    EXPECT_THAT(text_of<StepFailed>([&] {
                  engine.attempt([&] {
                    (model->loss(batch.input, batch.target) * std::numeric_limits<double>::infinity()).backward();
                    optimizer.step();
                  });
                }),
                HasSubstr("not finite"));
    engine.attempt([&] {
      model->loss(batch.input, batch.target).backward();
      optimizer.step();
    });
    EXPECT_EQ(engine.step(), 1);
  });
}

// The others may be in any collective of the engine, with rounds of gradients open, in a slot or not, or local: in their
// backward one parameter's gradient has thrown, which the loop has caught.
TEST(FailingTogetherRulesTest, EndsEveryCollectiveOfTheEngine) {
  const TempDir dir;
  for (const ShardOptions& base : strategies()) {
    ShardOptions options = base;
    options.units = units_named({"a", "b"});
    const auto run = [&](const Context& context) {
      const auto model = in_turn(make_plain_model);
      Engine engine = shard(context, model, options);
      Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
      engine.keep_ema({});
      bool throws = false;
      model->b->weight.register_hook([&](const at::Tensor& gradient) {
        if (throws) throw std::runtime_error("caught by the loop");
        return gradient;
      });
      const auto backward = [&](int step) {
        const Batch batch = function_batch(step);
        model->loss(batch.input, batch.target).backward();
      };
      const auto train = [&](int steps) {
        for (int step = 0; step < steps; ++step) {
          backward(step);
          optimizer.step();
        }
      };
      const at::NoGradGuard writes_need_it;
      const auto with_gradients = [](const auto& body) {
        const at::AutoGradMode on(true);
        body();
      };
      const std::vector<std::function<void()>> collectives{
          [&] { engine.save(dir / "run"); },
          [&] { engine.consolidate(dir / "file.safetensors"); },
          [&] { engine.resume(dir / "run"); },
          [&] { const Summoned scope = engine.summon(); },
          [&] { const AveragedWeights scope = engine.use_ema(); },
          [&] { model->w.fill_(3); },
          [&] { const NoSync scope = engine.no_sync(); },
      };
      for (std::size_t i = 0; i < collectives.size(); ++i) {
        SCOPED_TRACE(i);
        with_gradients([&] { train(2); });  // so that a plan gives rounds their slots
        const Tensors before = parameters_of(*model);
        const auto body = [&] {
          throws = context.rank() != 1;
          with_gradients([&] {
            if (!throws) return backward(0);
            EXPECT_THROW(backward(0), std::runtime_error);
          });
          throws = false;
          if (context.rank() == 1) throw std::runtime_error("a bad sample");
          collectives[i]();
        };
        EXPECT_THAT(text_of<StepFailed>([&] { engine.attempt(body); }),
                    AllOf(HasSubstr("rank 1"), HasSubstr("a bad sample")));
        EXPECT_EQ(engine.memory().held_gradient_bytes, 0U);
        for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, before.at(name), 0, 0, name);
      }
      // Every rank is at the same step, with all its slots.
      with_gradients([&] { train(2); });
      const std::int64_t overflows = engine.memory().overflows;
      with_gradients([&] { train(3); });
      EXPECT_EQ(engine.memory().overflows, overflows);
      EXPECT_EQ(engine.step(), 2 * static_cast<std::int64_t>(collectives.size()) + 5);
    };
    run_ranks(3, run, {.timeout = std::chrono::seconds(10)});
  }
  EXPECT_TRUE(files_below(dir.path()).empty());
}

// A scope that is open around it is closed on every rank, the one whose settlement that was included.
TEST(FailingTogetherRulesTest, LeavesAScopeOfAveragesWhole) {
  for (const int failing : {0, 1}) {
    run_ranks(2,
              [&](const Context& context) {
                const auto model = in_turn(make_plain_model);
                Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
                Optimizer optimizer = engine.optimizer(SGD{.lr = 1});
                engine.keep_ema({.decay = 0.5});
                const Batch batch = function_batch(0);
                model->loss(batch.input, batch.target).backward();
                optimizer.step();
                const Tensors weights = parameters_of(*model);
                std::string text;
                try {
                  AveragedWeights scope = engine.use_ema();
                  engine.attempt([&] {
                    if (context.rank() == failing) throw std::runtime_error("a bad sample");
                    const at::NoGradGuard no_grad;
                    model->loss(batch.input, batch.target);
                  });
                  scope.close();
                } catch (const StepFailed& error) {
                  text = error.what();
                }
                EXPECT_THAT(text, HasSubstr("a bad sample"));
                for (const auto& [name, value] : parameters_of(*model))
                  expect_equal(value, weights.at(name), 0, 0, name);
                model->loss(batch.input, batch.target).backward();
                optimizer.step();
                EXPECT_EQ(engine.step(), 2);
              },
              {.timeout = std::chrono::seconds(10)});
  }
}

// A collective of the communicator itself knows nothing of steps: the job ends, and no rank goes on a step apart.
TEST(FailingTogetherRulesTest, EndsTheJobWhereAnotherRankIsInACollectiveOfTheCommunicator) {
  std::atomic<int> ended{0};
  EXPECT_THROW(run_ranks(2,
                         [&](const Context& context) {
                           const auto model = in_turn(make_plain_model);
                           Engine engine = shard(context, model, {.units = units_named({"a", "b"})});
                           Optimizer optimizer = engine.optimizer(SGD{});
                           try {
                             engine.attempt([&] {
                               if (context.rank() == 1) throw std::runtime_error("a bad sample");
                               context.mean(1);
                             });
                           } catch (const std::exception&) {
                           }
                           try {
                             optimizer.step();
                           } catch (const std::exception& error) {
                             EXPECT_THAT(error.what(), HasSubstr("a bad sample"));
                             ++ended;
                             throw;
                           }
                         }),
               CommunicationError);
  EXPECT_EQ(ended, 2);
}

}  // namespace
}  // namespace fsdp::testing
