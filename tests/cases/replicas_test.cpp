// Ranks that hold copies: what is copied is exchanged, and counts once in a norm.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <fsdp/testing.h>

#include "tests/cases/case_support.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Strategy kSharding[] = {Strategy::kShardOptimizer, Strategy::kShardGradients, Strategy::kFullShard};

// Views of whole tensors only.
void expect_same_copy_on_every_rank(const Context& context, const std::vector<ShardView>& views,
                                    const std::string& when) {
  std::vector<std::byte> own;
  for (const ShardView& view : views) {
    std::int64_t numel = 1;
    for (const std::int64_t size : view.shape) numel *= size;
    ASSERT_EQ(view.end - view.begin, numel) << when << ": " << view.name << " is not whole";
    own.insert(own.end(), view.data, view.data + static_cast<std::size_t>(numel) * size_of(view.dtype));
  }
  ASSERT_FALSE(own.empty());
  std::vector<std::byte> all(own.size() * static_cast<std::size_t>(context.world_size()));
  context.communicator().all_gather(own, all);
  for (std::size_t rank = 0; rank * own.size() < all.size(); ++rank) {
    EXPECT_TRUE(std::equal(own.begin(), own.end(), all.begin() + static_cast<std::ptrdiff_t>(rank * own.size())))
        << when << ": rank " << rank << " has drifted away";
  }
}

class C04ShardGroupOfOneRank : public ::testing::TestWithParam<Layout> {};

// C04: each rank shards among itself alone, so that all hold whole copies. A short cut that skips collectives for a
// group of one also skips the exchange between the copies, and ranks that see other rows drift apart in silence.
// Gradients, weights and momentum have the same bits on all ranks after each step, and equal the reference.
TEST_P(C04ShardGroupOfOneRank, ExchangesGradientsBetweenTheCopies) {
  Scenario scenario{.make_model = seeded<StackModel>(3, 9),
                    .units = units_named({"layers.0", "layers.2"}),
                    .optimizer = SGD{.lr = 0.1, .momentum = 0.9},
                    .strategy = GetParam().strategy,
                    .shard_group = GetParam().shard_group};
  scenario.script = [](Session& session) {
    for (int step = 0; step < 5; ++step) {
      const std::string when = "step " + std::to_string(step);
      const Batch batch = session.part(rows(12, 9, 9, 40 + static_cast<std::uint64_t>(step)));
      session.model().loss(batch.input, batch.target).backward();
      Engine* engine = session.engine();
      if (engine != nullptr) expect_same_copy_on_every_rank(*session.context(), engine->gradient_views(), when);
      session.see_gradients(when);
      session.step();
      if (engine != nullptr) expect_same_copy_on_every_rank(*session.context(), engine->shard_views(), when);
      session.see_parameters(when);
    }
  };
  expect_same_seen(run_sharded(scenario, GetParam().world_size), run_plain(scenario));
}

std::vector<Layout> copies() {
  std::vector<Layout> layouts;
  for (const int world_size : {1, 2, 3, 4}) {
    for (const Strategy strategy : kSharding) layouts.push_back({world_size, strategy, 1});
    layouts.insert(layouts.end(), {{world_size, Strategy::kReplicate}, {world_size, Strategy::kReplicate, 1}});
  }
  return layouts;
}
INSTANTIATE_TEST_SUITE_P(Grid, C04ShardGroupOfOneRank, ::testing::ValuesIn(copies()),
                         [](const auto& tested) { return name_of(tested.param); });

struct PieceImpl final : torch::nn::Module {
  explicit PieceImpl(const std::vector<float>& values)
      : gradient(at::tensor(values)), weight(register_parameter("weight", at::zeros_like(gradient))) {}
  at::Tensor gradient, weight;
};
TORCH_MODULE(Piece);

using Gradients = std::vector<std::vector<float>>;

// One sub-module per gradient: piece0, piece1, ...
struct GivenGradients final : torch::nn::Module {
  explicit GivenGradients(const Gradients& gradients) : torch::nn::Module("GivenGradients") {
    for (std::size_t i = 0; i < gradients.size(); ++i)
      pieces.push_back(register_module("piece" + std::to_string(i), Piece(gradients[i])));
  }
  // Ranks differ by whole numbers around 1, so that their mean has no rounding.
  at::Tensor loss(const Context& context) const {
    const double factor = 1 + context.rank() - 0.5 * (context.world_size() - 1);
    at::Tensor sum = at::zeros({});
    for (const Piece& piece : pieces) sum = sum + (piece->weight * piece->gradient).sum() * factor;
    return sum;
  }
  std::vector<Piece> pieces;
};

const Units kEachAlone = units<Piece>();
const Units kFirstTwoInTheRoot = units_if(
    [](const std::string& name, const torch::nn::Module&) { return name.size() > 1 && name[1] > '1'; });

// One step with lr 1 clipped to a norm of 1: the norm that all ranks report must be `norm`, and the weights what is
// left of the gradients.
void expect_norm(int world_size, const Gradients& gradients, const ShardOptions& options, double p, double norm) {
  run_ranks(world_size, [&](const Context& context) {
    at::set_num_threads(1);
    const auto model = std::make_shared<GivenGradients>(gradients);
    Engine engine = shard(context, model, options);
    Optimizer optimizer = engine.optimizer(SGD{.lr = 1});
    for (int step = 1; step <= 2; ++step) {
      model->loss(context).backward();
      const double found = optimizer.step({.max_grad_norm = 1, .norm_type = p}).grad_norm;
      EXPECT_NEAR(found, norm, 1e-6 * norm) << "rank " << context.rank() << ", p " << p << ", step " << step;
      double largest = found;
      context.communicator().all_reduce(reinterpret_cast<std::byte*>(&largest), 1, DType::kFloat64, ReduceOp::kMax);
      EXPECT_EQ(found, largest) << "other bits on another rank";
      for (const Piece& piece : model->pieces)
        expect_equal(piece->weight.detach().clone(), -step * piece->gradient / norm, 2e-6, 1e-5, "weight");
    }
  });
}

// C10: a sharded unit with the gradient (3, 4) beside a replicated one with 12. Local squares summed over ranks count
// the replicated one once per rank, and clipping is too strong. The norm is 13 whatever holds what.
TEST(C10GradientNorm, CountsAReplicatedUnitOnceHoweverManyRanksHoldIt) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const Strategy sharded : kSharding) {
      for (const int group : {0, 1, world_size == 4 ? 2 : 0}) {
        SCOPED_TRACE(name_of(Layout{world_size, sharded, group}));
        ShardOptions options{.units = kEachAlone, .strategy = sharded, .shard_group = group};
        options.per_unit = [](const std::string& unit) -> std::optional<UnitOptions> {
          if (unit == "piece1") return UnitOptions{.strategy = Strategy::kReplicate};
          return std::nullopt;
        };
        expect_norm(world_size, {{3, 4}, {12}}, options, 2, 13);
      }
    }
  }
}

// Every pair of strategies, over sizes that leave some ranks with nothing of a unit.
TEST(C10GradientNorm, IsTheSameForEveryPairOfStrategies) {
  constexpr Strategy kAll[] = {Strategy::kReplicate, Strategy::kShardOptimizer, Strategy::kShardGradients,
                               Strategy::kFullShard};
  for (const int world_size : {1, 2, 3, 4}) {
    for (const Strategy first : kAll) {
      for (const Strategy second : kAll) {
        SCOPED_TRACE(name_of(Layout{world_size, first}) + " and " + name_of(Layout{world_size, second}));
        ShardOptions options{.units = kEachAlone};
        options.per_unit = [=](const std::string& unit) {
          return UnitOptions{.strategy = unit == "piece0" ? first : second};
        };
        expect_norm(world_size, {std::vector<float>(64, 1), {2, 4, 4, 5, 10, 10, 10, 10}}, options, 2,
                    std::sqrt(64.0 + 461.0));
      }
    }
  }
}

// C11: two replicas of two shards each. A sum over the whole world, where one over a replica's shards is meant, grows
// with the number of replicas. The norm of (3, 4) is 5 in replicas of any size.
TEST(C11NormInReplicas, DoesNotGrowWithTheirNumber) {
  for (const auto& [world_size, group] : {std::pair{1, 1}, {2, 1}, {2, 2}, {3, 1}, {3, 3}, {4, 1}, {4, 2}, {4, 4}}) {
    for (const Strategy strategy : kSharding) {
      SCOPED_TRACE(name_of(Layout{world_size, strategy, group}));
      const ShardOptions options{.units = kEachAlone, .strategy = strategy, .shard_group = group};
      expect_norm(world_size, {{3, 4}}, options, 2, 5);
      expect_norm(world_size, {{3}, {0, 4}}, options, 2, 5);
      expect_norm(world_size, {std::vector<float>(100, 0.5F), {}, {12}}, options, 2, 13);
    }
  }
}

double norm_by_hand(const Gradients& gradients, double p) {
  double sum = 0, largest = 0;
  for (const auto& gradient : gradients) {
    for (const float value : gradient) {
      sum += std::pow(std::abs(static_cast<double>(value)), p);
      largest = std::max(largest, std::abs(static_cast<double>(value)));
    }
  }
  return p == kInfinity ? largest : std::pow(sum, 1 / p);
}

class C12OtherNorms : public ::testing::TestWithParam<Layout> {};

// C12: norms of parts squared and added whatever p is, or a sum over ranks where the largest is meant. The gradients
// (3) and (4) have the norms 7, 5, 4.498 and 4 for p = 1, 2, 3 and infinity, in whatever units and on however many
// ranks they are.
TEST_P(C12OtherNorms, AreCombinedWithTheirOwnExponent) {
  ASSERT_NEAR(norm_by_hand({{3}, {4}}, 3), 4.498, 1e-3);
  const Gradients longer{{1, -2, 0, 7}, {}, {-9, 0.25F, 3, 3, 3}, {0.5F}, std::vector<float>(37, -0.125F)};
  for (const Units& cut : {kEachAlone, kFirstTwoInTheRoot}) {
    const ShardOptions options{.units = cut, .strategy = GetParam().strategy, .shard_group = GetParam().shard_group};
    for (const auto& [p, norm] : {std::pair{1.0, 7.0}, {2.0, 5.0}, {3.0, std::cbrt(91.0)}, {kInfinity, 4.0}})
      expect_norm(GetParam().world_size, {{3}, {4}, {0}}, options, p, norm);
    for (const double p : {0.5, 1.5, 4.0, kInfinity})
      expect_norm(GetParam().world_size, longer, options, p, norm_by_hand(longer, p));
  }
}
INSTANTIATE_TEST_SUITE_P(Grid, C12OtherNorms, ::testing::ValuesIn(all_layouts()),
                         [](const auto& tested) { return name_of(tested.param); });

// Two elements and none at all: at four ranks most own nothing.
class TinyModel final : public RowModel {
 public:
  TinyModel() : RowModel("TinyModel") {
    fc = register_module("fc", Linear(1, 1));
    empty = register_parameter("empty", at::zeros({0, 4}));
  }
  at::Tensor forward(const at::Tensor& x) override { return fc(x) + empty.sum(); }
  Linear fc{nullptr};
  at::Tensor empty;
};

// Scaled steps, one of which overflows on the last rank alone; saved and loaded between them.
Scenario tiny_training(const TempDir& dir, const Units& cut) {
  Scenario scenario{.make_model = seeded<TinyModel>(), .units = cut, .optimizer = SGD{.lr = 0.1, .momentum = 0.9}};
  scenario.script = [&dir](Session& session) {
    LossScaler scaler({.initial_scale = 1024});
    const bool is_plain = session.engine() == nullptr;
    for (int step = 0; step < 6; ++step) {
      const std::string when = "step " + std::to_string(step);
      const Batch batch = session.part(rows(12, 1, 1, 60 + static_cast<std::uint64_t>(step)));
      at::Tensor loss = session.model().loss(batch.input, batch.target);
      if (step == 2) {
        if (is_plain) continue;
        const Context& context = *session.context();
        if (context.rank() == context.world_size() - 1) loss = loss * kInfinity;
        scaler.scale(loss).backward();
        session.step({.max_grad_norm = 0.05, .scaler = &scaler});
        EXPECT_EQ(scaler.scale(), 512) << "rank " << context.rank();
        continue;
      }
      (is_plain ? loss : scaler.scale(loss)).backward();
      const double norm = session.step({.max_grad_norm = 0.05, .scaler = is_plain ? nullptr : &scaler});
      session.see(when + ": norm", at::scalar_tensor(norm, at::kDouble));
      session.see_parameters(when);
      if (step == 3) session.save_and_restart(dir / "runs");
    }
  };
  return scenario;
}

// C14: a model of two elements and a parameter of none, so that ranks own no element. An early return before a
// collective hangs the others, an optimizer made for no tensor throws. Loss scale, clipping, steps, and both forms of
// checkpoint equal the reference.
TEST(C14RankThatOwnsNothing, TakesPartInEveryStepAndSave) {
  std::vector<Layout> layouts = all_layouts();
  layouts.insert(layouts.end(), {{6, Strategy::kFullShard}, {6, Strategy::kShardOptimizer, 3}});
  for (const Units& cut : {units<Linear>(), Units{}}) {
    for (const Layout& layout : layouts) {
      const TempDir dir;
      expect_equals_reference(tiny_training(dir, cut), {layout});
    }
  }
}

TEST(C14RankThatOwnsNothing, WritesAndReadsAConsolidatedFile) {
  const TempDir dir;
  Scenario scenario{.make_model = seeded<TinyModel>(), .units = units<Linear>()};
  scenario.script = [&](Session& session) {
    for (int step = 0; step < 4; ++step) {
      train(session, rows(12, 1, 1, 60 + static_cast<std::uint64_t>(step)), "step " + std::to_string(step));
      if (step == 1) session.consolidate_and_restart(dir / "model.safetensors");
    }
  };
  expect_equals_reference(scenario, all_layouts());
}

}  // namespace
}  // namespace fsdp::testing
