// Ranks whose programs differ: in what they call, how often, in which order, on what model, and when they leave.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <fsdp/testing.h>

#include "tests/behaviour/function_model.h"
#include "tests/cases/case_support.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

constexpr auto kTimeout = std::chrono::seconds(10);
constexpr std::int64_t kWidth = 8;

Batch batch_of(int step) { return rows(12, kWidth, kWidth, 100 + static_cast<std::uint64_t>(step)); }

ShardOptions options_of(const Layout& layout) {
  return {.units = units<Linear>(), .strategy = layout.strategy, .shard_group = layout.shard_group};
}

// The text of the fsdp::Error that ends each rank's body; "" where none does. None may wait for the timeout.
std::vector<std::string> errors_of_ranks(int world_size, const std::function<void(const Context&)>& body) {
  std::vector<std::string> texts(static_cast<std::size_t>(world_size));
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(world_size,
            [&](const Context& context) {
              try {
                body(context);
              } catch (const Error& error) {
                texts[static_cast<std::size_t>(context.rank())] = error.what();
              }
            },
            {.timeout = kTimeout});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kTimeout) << "some rank waited for the timeout";
  return texts;
}

struct RankTraining {
  std::shared_ptr<StackModel> model;
  Engine engine;
  Optimizer optimizer;
  explicit RankTraining(const Context& context)
      : model(in_turn([] { return std::make_shared<StackModel>(3, kWidth); })),
        engine(shard(context, model, {.units = units<Linear>()})),
        optimizer(engine.optimizer(SGD{.lr = 0.1})) {}
  void backward(int step) const {
    const Batch batch = batch_of(step);
    model->loss(batch.input, batch.target).backward();
  }
};

// C42: "new best, save now" decided by a loss that was reduced to rank 0 only. The mean over ranks has the same bits on
// all of them, so all decide alike and save together.
TEST(C42RanksThatDisagree, DoNotWhereTheLossIsTheMeanOverRanks) {
  for (const int world_size : {1, 2, 3, 4}) {
    const TempDir dir;
    run_ranks(world_size,
              [&](const Context& context) {
                RankTraining training(context);
                double best = 1e9;
                for (int step = 0; step < 6; ++step) {
                  const double own = 1.0 / (1 + step) + 0.1 * ((context.rank() + step) % world_size);
                  const double loss = context.mean(own);
                  double least = loss, largest = loss;
                  const auto bytes = [](double& value) { return reinterpret_cast<std::byte*>(&value); };
                  context.communicator().all_reduce(bytes(least), 1, DType::kFloat64, ReduceOp::kMin);
                  context.communicator().all_reduce(bytes(largest), 1, DType::kFloat64, ReduceOp::kMax);
                  EXPECT_EQ(least, largest);
                  training.backward(step);
                  training.optimizer.step();
                  if (loss >= best) continue;
                  best = loss;
                  training.engine.save(dir / "best");
                }
              },
              {.timeout = kTimeout});
  }
}

// Each rank is told what another one calls.
TEST(C42RanksThatDisagree, AreToldSoWhenOneSavesAndTheOthersStep) {
  const TempDir dir;
  for (const int world_size : {2, 3, 4}) {
    for (const auto& text : errors_of_ranks(world_size, [&](const Context& context) {
           RankTraining training(context);
           training.backward(0);
           if (context.rank() == world_size - 1) {
             training.engine.save(dir / "best");
           } else {
             training.optimizer.step();
           }
         })) {
      EXPECT_THAT(text, AllOf(HasSubstr("Engine::save"), HasSubstr("Optimizer::step"), HasSubstr("same calls"),
                              HasSubstr("rank " + std::to_string(world_size - 1))));
    }
  }
}

struct LoneCall {
  const char* name;
  const char* called;  // as errors say it
  std::function<void(RankTraining&, const TempDir&)> call;
};
void PrintTo(const LoneCall& value, std::ostream* out) { *out << value.name; }

class C43CallByRankZeroOnly : public ::testing::TestWithParam<LoneCall> {};

// C43: a call in "if rank 0" has collectives in it, and waits for ranks that never come. They go on with the next step:
// all ranks get an error, and none waits for the timeout.
TEST_P(C43CallByRankZeroOnly, EndsEveryRankThatGoesOn) {
  const TempDir dir;
  for (const int world_size : {2, 3}) {
    const auto texts = errors_of_ranks(world_size, [&](const Context& context) {
      RankTraining training(context);
      training.backward(0);
      training.optimizer.step();
      if (context.is_main()) GetParam().call(training, dir);
      for (int step = 1; step < 3; ++step) {
        training.backward(step);
        training.optimizer.step({.max_grad_norm = 1});
      }
    });
    for (const std::string& text : texts)
      EXPECT_THAT(text, AllOf(HasSubstr(GetParam().called), HasSubstr("Optimizer::step"), HasSubstr("same calls")));
  }
}

class C43CallAfterTheOthersLeft : public ::testing::TestWithParam<LoneCall> {};

// Or they have ended their part: rank 0 is told that they left. A lone step is found here only, since a step without a
// backward is one of a rank that has run out of data.
TEST_P(C43CallAfterTheOthersLeft, IsToldSo) {
  const TempDir dir;
  for (const int world_size : {2, 3}) {
    const auto texts = errors_of_ranks(world_size, [&](const Context& context) {
      RankTraining training(context);
      training.backward(0);
      training.optimizer.step();
      if (context.is_main()) GetParam().call(training, dir);
    });
    EXPECT_THAT(texts[0], HasSubstr("left")) << "rank 0 went through alone";
  }
}

const LoneCall kLoneCalls[] = {
    {"Save", "Engine::save", [](RankTraining& own, const TempDir& dir) { own.engine.save(dir / "runs"); }},
    {"Consolidate", "Engine::consolidate",
     [](RankTraining& own, const TempDir& dir) { own.engine.consolidate(dir / "file"); }},
    {"Resume", "Engine::resume", [](RankTraining& own, const TempDir& dir) { own.engine.resume(dir / "runs"); }},
    {"GradientViews", "Engine::gradient_views", [](RankTraining& own, const TempDir&) { own.engine.gradient_views(); }},
    {"Summon", "Engine::summon",
     [](RankTraining& own, const TempDir&) {
       Summoned scope = own.engine.summon({.gradients = true});
       scope.close();
     }},
};
const auto kCallName = [](const auto& tested) { return std::string(tested.param.name); };
INSTANTIATE_TEST_SUITE_P(Calls, C43CallByRankZeroOnly, ::testing::ValuesIn(kLoneCalls), kCallName);
INSTANTIATE_TEST_SUITE_P(Calls, C43CallAfterTheOthersLeft, ::testing::ValuesIn(kLoneCalls), kCallName);
INSTANTIATE_TEST_SUITE_P(Step, C43CallAfterTheOthersLeft,
                         ::testing::Values(LoneCall{"Step", "Optimizer::step",
                                                    [](RankTraining& own, const TempDir&) { own.optimizer.step(); }}),
                         kCallName);

class HeadModel final : public RowModel {
 public:
  HeadModel() : RowModel("HeadModel") {
    trunk = register_module("trunk", Linear(kWidth, kWidth));
    a = register_module("a", Linear(kWidth, kWidth));
    b = register_module("b", Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) override { return b(at::tanh(a(at::tanh(trunk(x))))); }
  Linear trunk{nullptr}, a{nullptr}, b{nullptr};
};

std::shared_ptr<HeadModel> make_head_model() {
  at::manual_seed(11);
  return std::make_shared<HeadModel>();
}

using RankLoss = std::function<at::Tensor(HeadModel&, int step, int rank)>;

// Ranks that compute what they please: gradients are the mean over them. `before_step` runs on ranks only.
void expect_mean_over_ranks(const RankLoss& loss,
                            const std::function<void(HeadModel&, Engine&, int)>& before_step = {}) {
  constexpr int kSteps = 4;
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(name_of(layout));
    at::set_num_threads(1);
    const auto plain = make_head_model();
    for (int step = 0; step < kSteps; ++step) {
      for (int rank = 0; rank < layout.world_size; ++rank) (loss(*plain, step, rank) / layout.world_size).backward();
      const at::NoGradGuard no_grad;
      for (at::Tensor& p : plain->parameters()) p.sub_(p.grad(), 0.1);
      plain->zero_grad();
    }
    const Tensors expected = parameters_of(*plain);
    run_ranks(layout.world_size,
              [&](const Context& context) {
                at::set_num_threads(1);
                const auto model = in_turn(make_head_model);
                Engine engine = shard(context, model, options_of(layout));
                Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
                for (int step = 0; step < kSteps; ++step) {
                  if (before_step) before_step(*model, engine, context.rank());
                  loss(*model, step, context.rank()).backward();
                  optimizer.step();
                }
                for (const auto& [name, value] : parameters_of(*model))
                  expect_equal(value, expected.at(name), 1e-6, 1e-5, name);
              },
              {.timeout = kTimeout});
  }
}

// C44: rank k calls the head k + 1 times in a step. Where each call is a collective, the third gather of one rank meets
// another unit's on its peer. Here gathers need no peer: gradients are the mean over ranks of the sums over calls.
TEST(C44UnitCalledMoreOftenOnSomeRanks, GivesTheMeanOfTheirGradients) {
  expect_mean_over_ranks([](HeadModel& model, int step, int rank) {
    const Batch batch = batch_of(10 * step + rank);
    const at::Tensor hidden = at::tanh(model.trunk(batch.input));
    at::Tensor loss = at::mse_loss(model.a(hidden), batch.target);
    for (int call = 0; call < rank; ++call) loss = loss + model.a(hidden * (0.5 + call)).square().mean();
    return loss + model.b(hidden).square().mean();
  });
  // Stacked, and with another count in each step.
  expect_mean_over_ranks([](HeadModel& model, int step, int rank) {
    const Batch batch = batch_of(10 * step + rank);
    at::Tensor h = model.trunk(batch.input);
    for (int call = 0; call <= (rank + step) % 3; ++call) h = at::tanh(model.a(h));
    return at::mse_loss(model.b(h), batch.target);
  });
}

RankLoss whole_model() {
  return [](HeadModel& model, int step, int rank) {
    const Batch batch = batch_of(10 * step + rank);
    return model.loss(batch.input, batch.target);
  };
}

void generate(HeadModel& model, int passes) {
  const at::NoGradGuard no_grad;
  const at::Tensor input = batch_of(99).input;
  const at::Tensor first = model.forward(input);
  for (int pass = 1; pass < passes; ++pass) EXPECT_TRUE(at::equal(model.forward(input), first)) << "pass " << pass;
}

// C45: a loop without gradients that ends at another length on each rank, as generation does, then a training step.
// Ranks that are still in a gather of the loop meet others that are in the next phase. All is well within the scope
// that keeps units gathered, and without it.
TEST(C45LoopOfAnotherLengthOnEachRank, LeavesTrainingAlone) {
  expect_mean_over_ranks(whole_model(), [](HeadModel& model, Engine& engine, int rank) {
    const KeepGathered scope = engine.keep_gathered();
    generate(model, 3 + 2 * rank);
  });
  expect_mean_over_ranks(whole_model(), [](HeadModel& model, Engine&, int rank) { generate(model, 7 - 2 * rank); });
}

// C46: two units of equal size, in another order on each rank. Collectives in the order in which a rank gets ready
// would put one unit's numbers into the other, as no size gives them away.
TEST(C46UnitsInAnotherOrderOnEachRank, KeepTheirOwnGradients) {
  expect_mean_over_ranks([](HeadModel& model, int step, int rank) {
    const Batch batch = batch_of(10 * step + rank);
    const at::Tensor hidden = at::tanh(model.trunk(batch.input));
    Linear first = (rank + step) % 2 == 0 ? model.a : model.b, second = (rank + step) % 2 == 0 ? model.b : model.a;
    const at::Tensor one = first(hidden).square().mean(), two = second(hidden).square().mean();
    return (rank + step) % 2 == 0 ? one + 3 * two : 3 * one + two;
  });
  // One inside of the other's output.
  expect_mean_over_ranks([](HeadModel& model, int, int rank) {
    const Batch batch = batch_of(rank);
    Linear first = rank % 2 == 0 ? model.a : model.b, second = rank % 2 == 0 ? model.b : model.a;
    return at::mse_loss(second(at::tanh(first(model.trunk(batch.input)))), batch.target);
  });
}

struct OneOddRank {
  const char* name;
  std::vector<const char*> difference;  // as errors say it: the odd rank's, rank 0's
  std::function<std::shared_ptr<torch::nn::Module>(bool odd)> make;
};
void PrintTo(const OneOddRank& value, std::ostream* out) { *out << value.name; }

struct PairModule final : torch::nn::Module {
  PairModule() : torch::nn::Module("Pair") {}
};

std::shared_ptr<torch::nn::Module> pair_of(std::initializer_list<std::pair<const char*, Linear>> layers) {
  auto module = std::make_shared<PairModule>();
  for (const auto& [name, layer] : layers) module->register_module(name, layer);
  return module;
}

class C47OtherModelOnOneRank : public ::testing::TestWithParam<OneOddRank> {};

// C47: one rank builds another model: other shapes, another order of registration, another type. Collectives of other
// sizes hang or give wrong numbers. fsdp::shard refuses on every rank and names the rank.
TEST_P(C47OtherModelOnOneRank, IsRefusedByShardOnEveryRank) {
  for (const int world_size : {2, 3, 4}) {
    for (const int odd : {1, world_size - 1}) {
      const auto texts = errors_of_ranks(world_size, [&](const Context& context) {
        shard(context, in_turn([&] { return GetParam().make(context.rank() == odd); }), {.units = units<Linear>()});
      });
      for (const std::string& text : texts) {
        EXPECT_THAT(text, AllOf(HasSubstr("rank " + std::to_string(odd)), HasSubstr("another model")));
        for (const char* part : GetParam().difference) EXPECT_THAT(text, HasSubstr(part));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, C47OtherModelOnOneRank,
    ::testing::Values(OneOddRank{"Shape",
                                 {"parameter a.weight Float [9, 8]", "rank 0 has parameter a.weight Float [8, 8]"},
                                 [](bool odd) {
                                   return pair_of({{"a", Linear(8, odd ? 9 : 8)}, {"b", Linear(8, 8)}});
                                 }},
                      OneOddRank{"ShapeOfTheSameSize",
                                 {"parameter a.weight Float [6, 4]", "rank 0 has parameter a.weight Float [4, 6]"},
                                 [](bool odd) {
                                   return pair_of({{"a", odd ? Linear(4, 6) : Linear(6, 4)}, {"b", Linear(2, 2)}});
                                 }},
                      OneOddRank{"Order",
                                 {"unit b ", "rank 0 has unit a "},
                                 [](bool odd) {
                                   const Linear a(8, 8), b(8, 8);
                                   return odd ? pair_of({{"b", b}, {"a", a}}) : pair_of({{"a", a}, {"b", b}});
                                 }},
                      OneOddRank{"Type",
                                 {"parameter a.weight BFloat16 [8, 8]", "rank 0 has parameter a.weight Float [8, 8]"},
                                 [](bool odd) {
                                   auto module = pair_of({{"a", Linear(8, 8)}, {"b", Linear(8, 8)}});
                                   if (odd) module->to(at::kBFloat16);
                                   return module;
                                 }},
                      OneOddRank{
                          "Frozen",
                          {"parameter a.weight Float [8, 8] frozen", "rank 0 has parameter a.weight Float [8, 8]"},
                          [](bool odd) {
                            auto module = pair_of({{"a", Linear(8, 8)}, {"b", Linear(8, 8)}});
                            module->parameters()[0].requires_grad_(!odd);
                            return module;
                          }},
                      OneOddRank{"OneMore",
                                 {"unit b ", "rank 0 has nothing more"},
                                 [](bool odd) {
                                   auto module = pair_of({{"a", Linear(8, 8)}});
                                   if (odd) module->register_module("b", Linear(8, 8));
                                   return module;
                                 }}),
    [](const auto& tested) { return std::string(tested.param.name); });

// What rank 0 reads after three steps. Where it does not wait, the others' engines go right after the last step, while
// rank 0 still gathers their shares; or all go in the middle of a fourth step, whose reductions are under way.
enum class Leaving { kTogether, kBeforeRankZeroReads, kInTheMiddleOfAStep };

Tensors trained_values(const Layout& layout, Leaving leaving) {
  Tensors values;
  run_ranks(layout.world_size,
            [&](const Context& context) {
              at::set_num_threads(1);
              const auto model = in_turn(make_head_model);
              Engine engine = shard(context, model, options_of(layout));
              Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
              const auto backward = [&](int step) { whole_model()(*model, step, context.rank()).backward(); };
              for (int step = 0; step < 3; ++step) {
                backward(step);
                optimizer.step();
              }
              if (leaving == Leaving::kBeforeRankZeroReads && !context.is_main()) return;
              if (leaving == Leaving::kInTheMiddleOfAStep) backward(3);
              Tensors own = parameters_of(*model);
              if (context.is_main()) values = std::move(own);
              if (leaving == Leaving::kTogether) context.communicator().barrier();
            },
            {.timeout = kTimeout});
  return values;
}

// C49: an engine goes while work is under way. A destructor that aborts, where it should let things end, spoils what a
// peer still reads. Fifty runs that leave at once give the bits of one that waits, and no error on any rank.
TEST(C49EngineDestroyedAtOnce, LeavesItsPeersLastStepAlone) {
  for (const Layout layout : {Layout{2}, Layout{3, Strategy::kShardOptimizer}, Layout{3, Strategy::kShardGradients},
                              Layout{4, Strategy::kFullShard, 2}, Layout{4, Strategy::kReplicate}}) {
    const Tensors waited = trained_values(layout, Leaving::kTogether);
    ASSERT_EQ(waited.size(), 6U);
    for (const Leaving leaving : {Leaving::kBeforeRankZeroReads, Leaving::kInTheMiddleOfAStep}) {
      for (int run = 0; run < 50; ++run) {
        SCOPED_TRACE(name_of(layout) + ", run " + std::to_string(run));
        const Tensors values = trained_values(layout, leaving);
        for (const auto& [name, value] : waited) expect_equal(values.at(name), value, 0, 0, name);
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
