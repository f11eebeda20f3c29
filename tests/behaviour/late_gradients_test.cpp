// Gradients that come after others of the same step were reduced, read or left waiting; scopes that overlap. Two units a and
// b whose gradients are ones, so that every expected step is a number.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <optional>

#include "tests/behaviour/function_model.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct PairImpl final : torch::nn::Module {
  PairImpl() : torch::nn::Module("Pair") {
    p = register_parameter("p", at::zeros({8, 8}));
    q = register_parameter("q", at::zeros({8}));
  }
  at::Tensor sum() const { return p.sum() + q.sum(); }
  at::Tensor p, q;
};
TORCH_MODULE(Pair);

struct Pairs final : torch::nn::Module {
  Pairs() : torch::nn::Module("Pairs") {
    a = register_module("a", Pair());
    b = register_module("b", Pair());
  }
  Pair a{nullptr}, b{nullptr};
};

void on_two_ranks(ShardOptions options, const std::function<void(const Context&, Pairs&, Engine&, Optimizer&)>& body) {
  options.units = units<Pair>();
  run_ranks(2, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = std::make_shared<Pairs>();
    Engine engine = shard(context, std::static_pointer_cast<torch::nn::Module>(model), options);
    Optimizer optimizer = engine.optimizer(SGD{.lr = 1});
    body(context, *model, engine, optimizer);
  });
}

// The first and the last element belong to different ranks' shares.
void expect_moved(const at::Tensor& parameter, double by) {
  const at::Tensor values = parameter.detach().clone();
  EXPECT_EQ(values.min().item<double>(), -by);
  EXPECT_EQ(values.max().item<double>(), -by);
}

class LateGradientsTest : public ::testing::TestWithParam<Strategy> {};

TEST_P(LateGradientsTest, AddToWhatARankWithoutAnyHasReduced) {
  for (const bool summons : {false, true}) {
    on_two_ranks({.strategy = GetParam()}, [&](const Context& context, Pairs& m, Engine& engine, Optimizer& optimizer) {
      if (context.rank() == 1) m.a->sum().backward();
      if (summons) {
        const Summoned scope = engine.summon({.gradients = true});
      } else {
        engine.gradient_views();
      }
      if (context.rank() == 0) (m.a->sum() * 10).backward();
      optimizer.step();
      expect_moved(m.a->p, 5.5);
    });
  }
}

// keep_gathered takes the slots, so that the first round waits; what was cleared after it is cleared for it, too.
TEST_P(LateGradientsTest, StayBehindARoundThatWaitsForASlot) {
  on_two_ranks({.strategy = GetParam(), .prefetch = 0},
               [&](const Context&, Pairs& m, Engine& engine, Optimizer& optimizer) {
                 const KeepGathered kept = engine.keep_gathered();
                 (m.a->sum() + m.b->sum()).backward();
                 m.zero_grad();
                 {
                   const NoSync scope = engine.no_sync();
                   ((m.a->sum() + m.b->sum()) * 10).backward();
                 }
                 optimizer.step();
                 expect_moved(m.a->p, 10);
                 expect_moved(m.b->p, 10);
               });
}

// The same where one rank's last round that waits has the number of the other's first after the clear.
TEST(LateGradientsOfFullShardTest, AreClearedInRoundsThatWaitForASlot) {
  on_two_ranks({.prefetch = 0}, [&](const Context& context, Pairs& m, Engine& engine, Optimizer& optimizer) {
    const auto backward = [&](double factor) { ((m.a->sum() + m.b->sum()) * factor).backward(); };
    const KeepGathered kept = engine.keep_gathered();
    backward(100);
    if (context.rank() == 0) backward(100);
    m.zero_grad();
    if (context.rank() == 1) backward(1);
    optimizer.step();
    expect_moved(m.a->p, 0.5);
    expect_moved(m.b->p, 0.5);
  });
}

// Of what the module has cleared nothing counts, nor on a rank that has no backward after it: there the shares of the
// others' gradients begin anew, too.
TEST_P(LateGradientsTest, BeginAnewOnEveryRankThatHasCleared) {
  struct Case {
    bool to_none, leaves_a_round_open;
    int backwards;
  };
  std::vector<Case> cases;
  for (const bool to_none : {false, true}) {
    for (const bool open : {false, true}) {
      for (const int backwards : {0, 1, 2}) cases.push_back({to_none, open, backwards});
    }
  }
  for (const Case& chosen : cases) {
    on_two_ranks({.strategy = GetParam()}, [&](const Context& context, Pairs& m, Engine& engine, Optimizer& optimizer) {
      (m.a->sum() * 100).backward();
      if (chosen.backwards == 2) (m.a->sum() * 100).backward();
      if (context.rank() == 0 && chosen.leaves_a_round_open) m.a->p.sum().backward();
      m.zero_grad(chosen.to_none);
      for (int i = 0; i < chosen.backwards; ++i) {
        if (context.rank() == 1) m.a->sum().backward();
      }
      optimizer.step();
      expect_moved(m.a->p, 0.5 * chosen.backwards);
      expect_moved(m.a->q, 0.5 * chosen.backwards);
      EXPECT_EQ(engine.step(), 1);
    });
  }
}

// Where a rank has newer gradients in a sum with older ones of another, they cannot be taken apart: refused by name, on
// every rank. Optimizer::zero_grad has no such limit.
TEST_P(LateGradientsTest, RefuseAClearThatDoesNotFit) {
  on_two_ranks({.strategy = GetParam()}, [&](const Context& context, Pairs& m, Engine& engine, Optimizer& optimizer) {
    const auto both = [&] { return m.a->sum() + m.b->sum(); };
    both().backward();
    if (context.rank() == 0) both().backward();
    optimizer.step();
    // By now a plan tells the ranks of strategies that reduce once after how many backwards.
    const bool keeps = GetParam() == Strategy::kReplicate || GetParam() == Strategy::kShardOptimizer;
    if (keeps || context.rank() == 0) both().backward();
    m.zero_grad();
    both().backward();
    EXPECT_THAT(text_of<InvalidArgument>([&] { optimizer.step(); }),
                AllOf(HasSubstr("cleared the gradient"), HasSubstr("call Optimizer::zero_grad")));
    optimizer.zero_grad();
    both().backward();
    optimizer.zero_grad();
    both().backward();
    optimizer.step();
    expect_moved(m.a->p, 2.5);  // 1.5 of the first step
    EXPECT_EQ(engine.step(), 2);
  });
}

// The same where the rank that did not clear has published as many rounds as the others, so that none is left to restart.
TEST_P(LateGradientsTest, RefuseAClearThatIsSeenTooLateAndCanBeDropped) {
  on_two_ranks({.strategy = GetParam()}, [&](const Context& context, Pairs& m, Engine&, Optimizer& optimizer) {
    const auto both = [&] { return m.a->sum() + m.b->sum(); };
    if (context.rank() == 0) both().backward();
    m.zero_grad();
    both().backward();
    if (context.rank() == 1) both().backward();
    const bool reduces_once = GetParam() == Strategy::kReplicate || GetParam() == Strategy::kShardOptimizer;
    if (!reduces_once) {
      EXPECT_THAT(text_of<InvalidArgument>([&] { optimizer.step(); }), HasSubstr("cleared the gradient"));
    }
    optimizer.zero_grad();
    both().backward();
    optimizer.step();
    expect_moved(m.a->p, 1);
  });
}

// The gradients of one rank are in the sum when it clears them, and those of the other come first afterwards: none of
// them restarts. Or the rank clears alone, after its last backward.
TEST_P(LateGradientsTest, RefuseAClearOfWhatNoLaterRoundRestarts) {
  for (const bool alone : {false, true}) {
    on_two_ranks({.strategy = GetParam()}, [&](const Context& context, Pairs& m, Engine&, Optimizer& optimizer) {
      const auto backward = [&] { (m.a->sum() + m.b->sum()).backward(); };
      const bool reduces_once = GetParam() == Strategy::kReplicate || GetParam() == Strategy::kShardOptimizer;
      if (alone) {
        backward();
        if (context.rank() == 0) m.zero_grad();
      } else {
        if (context.rank() == 0) backward();
        m.zero_grad();
        if (context.rank() == 1) backward();
      }
      if (!reduces_once) {
        EXPECT_THAT(text_of<InvalidArgument>([&] { optimizer.step(); }),
                    HasSubstr("cleared the gradient of parameter"));
        optimizer.zero_grad();
        if (context.rank() == 1) backward();
      }
      optimizer.step();
      expect_moved(m.a->p, 0.5);
    });
  }
}

// A rank that never used p adds nothing to it, but its share holds what the others had before they cleared.
TEST_P(LateGradientsTest, RefuseAClearOfWhatAnotherRankHasOnlyAShareOf) {
  on_two_ranks({.strategy = GetParam()}, [&](const Context& context, Pairs& m, Engine&, Optimizer& optimizer) {
    const auto backward = [&] { (context.rank() == 0 ? m.a->sum() : m.a->q.sum()).backward(); };
    backward();
    m.zero_grad();
    backward();
    const bool reduces_once = GetParam() == Strategy::kReplicate || GetParam() == Strategy::kShardOptimizer;
    if (!reduces_once) {
      EXPECT_THAT(text_of<InvalidArgument>([&] { optimizer.step(); }), HasSubstr("parameter a.p"));
      optimizer.zero_grad();
      backward();
    }
    optimizer.step();
    expect_moved(m.a->p, 0.5);
    expect_moved(m.a->q, 1);
  });
}

TEST_P(LateGradientsTest, OfAPartOfAUnitAreKeptBesideLocalOnes) {
  for (const bool q_comes_first : {false, true}) {
    on_two_ranks({.strategy = GetParam()}, [&](const Context&, Pairs& m, Engine& engine, Optimizer& optimizer) {
      // Autograd begins with what was computed last.
      const auto backward = [&](double scale) {
        const at::Tensor first = (q_comes_first ? m.a->p : m.a->q).sum(),
                         last = (q_comes_first ? m.a->q : m.a->p).sum();
        ((first + last) * scale).backward();
      };
      m.a->p.sum().backward();
      {
        const NoSync scope = engine.no_sync();
        backward(10);
      }
      backward(100);
      optimizer.step();
      expect_moved(m.a->p, 111);
      expect_moved(m.a->q, 110);
    });
  }
}

// Within the scope .grad is the gradient itself, and the engine's collectives leave it where it was.
TEST_P(LateGradientsTest, OutliveCollectivesWithinTheirSummons) {
  const TempDir dir;
  on_two_ranks({.strategy = GetParam()}, [&](const Context&, Pairs& m, Engine& engine, Optimizer& optimizer) {
    (m.a->sum() * 3).backward();
    {
      const Summoned scope = engine.summon({.gradients = true});
      EXPECT_EQ(engine.gradient_views().size(), 2U);
      engine.consolidate(dir / "file.safetensors");
      const NoSync local = engine.no_sync();
      EXPECT_EQ(m.a->p.grad().max().item<double>(), 3);
    }
    optimizer.step();
    expect_moved(m.a->p, 3);
  });
}

// A pipeline's receive buffer is written again once backward has returned.
TEST_P(LateGradientsTest, AreCopiesOfTheUsersTensors) {
  on_two_ranks({.strategy = GetParam()}, [&](const Context&, Pairs& m, Engine&, Optimizer& optimizer) {
    const at::Tensor h = at::zeros({8, 8}).requires_grad_(true), received = at::ones({8, 8});
    (h + m.a->p).backward(received);
    received.fill_(2);
    (h + m.a->p).backward(received);
    received.fill_(100);
    optimizer.step();
    expect_moved(m.a->p, 3);
  });
}

TEST_P(LateGradientsTest, AreAddedUpAsWideAsTheOthers) {
  on_two_ranks({.strategy = GetParam(), .precision = {.param = at::kHalf}},
               [&](const Context&, Pairs& m, Engine&, Optimizer& optimizer) {
                 for (const int backwards : {1, 1, 3}) {
                   for (int i = 0; i < backwards; ++i) (m.a->sum() * 40000).backward();
                   EXPECT_NEAR(optimizer.step().grad_norm, backwards * 40000 * std::sqrt(72.0), 1);
                 }
               });
}

TEST_P(LateGradientsTest, SeePointerWritesOnlyWithinAScopeThatKeepsNone) {
  on_two_ranks({.strategy = GetParam()}, [&](const Context& context, Pairs& m, Engine& engine, Optimizer&) {
    {
      const Summoned scope = engine.summon();
      m.a->p.data_ptr<float>()[context.rank() * 40] += 100;
      m.a->p.data_ptr<float>()[40 - context.rank() * 40] += 100;
      EXPECT_THAT(text_of<InvalidArgument>([&] { engine.save("nowhere"); }), HasSubstr("Engine::summon"));
    }
    expect_moved(m.a->p, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, LateGradientsTest,
                         ::testing::Values(Strategy::kReplicate, Strategy::kShardOptimizer, Strategy::kShardGradients,
                                           Strategy::kFullShard));

TEST(OverlappingScopesTest, AreRefusedWhereOneWouldHideTheOther) {
  on_two_ranks({}, [](const Context&, Pairs& m, Engine& engine, Optimizer& optimizer) {
    engine.keep_ema({.decay = 0.5});
    m.a->sum().backward();
    optimizer.step();
    {
      const AveragedWeights averaged = engine.use_ema();
      EXPECT_THAT(text_of<InvalidArgument>([&] { const Summoned scope = engine.summon(); }), HasSubstr("use_ema"));
    }
    {
      const Summoned scope = engine.summon();
      EXPECT_THAT(text_of<InvalidArgument>([&] { const AveragedWeights averaged = engine.use_ema(); }),
                  HasSubstr("Engine::summon"));
    }
    expect_moved(m.a->p, 1);
  });
}

TEST(OverlappingScopesTest, MakeAGraphOfOtherWeightsThrow) {
  on_two_ranks({}, [](const Context&, Pairs& m, Engine& engine, Optimizer&) {
    engine.keep_ema({});
    const at::Tensor loss = (m.a->p * m.a->p).sum();
    const AveragedWeights averaged = engine.use_ema();
    EXPECT_THAT(text_of<std::exception>([&] { loss.backward(); }), HasSubstr("modified by an inplace"));
  });
}

TEST(ShardTensorOptimizerTest, KeepsEveryGroupsRateAndCountsItsSteps) {
  const TempDir dir;
  run_ranks(2, [&](const Context& context) {
    const auto make_engine = [&](const std::shared_ptr<Pairs>& model) {
      return shard(context, std::static_pointer_cast<torch::nn::Module>(model), {.units = units<Pair>()});
    };
    const auto grouped = std::make_shared<Pairs>();
    Engine engine = make_engine(grouped);
    Optimizer optimizer = engine.optimizer(TorchOptimizer{
        .make = [](const std::vector<ParameterShard>& shards) -> std::unique_ptr<torch::optim::Optimizer> {
          std::vector<torch::optim::OptimizerParamGroup> groups;
          for (const ParameterShard& shard : shards) {
            groups.emplace_back(std::vector{shard.tensor},
                                std::make_unique<torch::optim::SGDOptions>(shard.name == "a.p" ? 0.0 : 1.0));
          }
          return std::make_unique<torch::optim::SGD>(std::move(groups), torch::optim::SGDOptions(1));
        }});
    grouped->a->sum().backward();
    optimizer.step();
    expect_moved(grouped->a->p, 0);
    expect_moved(grouped->a->q, 1);

    // Momentum goes on in the fused optimizer: 1, then 1 + 0.5.
    const auto first = std::make_shared<Pairs>(), second = std::make_shared<Pairs>();
    Engine saving = make_engine(first);
    Optimizer torch = saving.optimizer(torch_optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1).momentum(0.5)));
    (first->a->sum() + first->b->sum()).backward();
    torch.step();
    saving.save(dir / "run");
    Engine resuming = make_engine(second);
    Optimizer fused = resuming.optimizer(SGD{.lr = 1, .momentum = 0.5});
    ASSERT_EQ(resuming.resume(dir / "run"), 1);
    (second->a->sum() + second->b->sum()).backward();
    fused.step();
    expect_moved(second->a->p, 2.5);
  });
}

}  // namespace
}  // namespace fsdp::testing
