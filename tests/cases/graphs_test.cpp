// What a step's graphs may look like: parts used in turn, recomputed, changed in place; and which weights an optimizer
// is given.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include "tests/behaviour/function_model.h"
#include "tests/cases/case_support.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

constexpr std::int64_t kWidth = 8;

struct BranchesImpl final : torch::nn::Module {
  BranchesImpl() {
    a = register_module("a", Linear(kWidth, kWidth));
    b = register_module("b", Linear(kWidth, kWidth));
    bias = register_parameter("bias", at::randn({kWidth}));
  }
  Linear a{nullptr}, b{nullptr};
  at::Tensor bias;
};
TORCH_MODULE(Branches);

class BranchModel final : public RowModel {
 public:
  BranchModel() : RowModel("BranchModel") { net = register_module("net", Branches()); }
  at::Tensor forward(const at::Tensor& x) override { return at::tanh((branch == 'A' ? net->a : net->b)(x)); }
  Branches net{nullptr};
  char branch = 'A';
};

// One letter per micro-batch: the branch it goes through. A step may leave one of them out.
const std::vector<std::string> kBranchesOfSteps{"AB", "BA", "AAB", "B", "ABBA", "A", "AB"};

Scenario branch_training(const Units& cut) {
  Scenario scenario{.make_model = seeded<BranchModel>(), .units = cut, .optimizer = SGD{.lr = 0.2, .momentum = 0.5}};
  scenario.script = [](Session& session) {
    std::uint64_t seed = 900;
    for (const std::string& branches : kBranchesOfSteps) {
      const std::string when = "step " + std::to_string(seed) + branches;
      for (const char branch : branches) {
        session.model_as<BranchModel>().branch = branch;
        const Batch batch = session.part(rows(12, kWidth, kWidth, ++seed));
        session.model().loss(batch.input, batch.target).backward();
      }
      session.see_gradients(when);
      session.step();
      session.see_parameters(when);
    }
  };
  return scenario;
}

// C06: the first micro-batch uses one branch and the second another. Bookkeeping that waits for each parameter once per
// micro-batch never sends a bucket that does not fill, or sends last time's content again. The branches are units of
// their own, or share one.
TEST(C06MicroBatchesOfOtherBranches, LoseNothingAndCountNothingTwice) {
  for (const Units& cut : {units<Linear>(), units_named({"net"}), Units{}})
    expect_equals_reference(branch_training(cut), all_layouts());
}

enum class Recomputed { kEachBlock, kAllNested, kSecondAlone };

// Two crops of a sequence through the same blocks.
class CropModel final : public LossModel {
 public:
  explicit CropModel(Recomputed recomputed) : LossModel("CropModel"), recomputed_(recomputed) {
    first = register_module("first", Block(12, 2));
    second = register_module("second", Block(12, 3));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    const at::Tensor whole = features(input), crop = features(input.narrow(1, 1, 3));
    return at::mse_loss(whole, target) + at::mse_loss(crop, target.narrow(1, 1, 3));
  }
  // Off in the reference, whose gradients are autograd's own.
  bool recomputes = false;
  Block first{nullptr}, second{nullptr};

 private:
  at::Tensor run(Block block, const at::Tensor& x, bool recomputed) const {
    const auto forward = [block](const at::Tensor& h) mutable { return block->forward(h); };
    return recomputes && recomputed ? recompute(forward, x) : block->forward(x);
  }
  at::Tensor both(const at::Tensor& x) const {
    return run(second, run(first, x, recomputed_ != Recomputed::kSecondAlone), true);
  }
  at::Tensor features(const at::Tensor& x) const {
    if (!recomputes || recomputed_ != Recomputed::kAllNested) return both(x);
    return recompute([this](const at::Tensor& h) { return both(h); }, x);
  }
  Recomputed recomputed_;
};

Scenario crop_training(Recomputed recomputed) {
  Scenario scenario{.make_model = seeded<CropModel>(recomputed), .units = units<Block>()};
  scenario.script = [](Session& session) {
    Engine* engine = session.engine();
    session.model_as<CropModel>().recomputes = engine != nullptr;
    for (int step = 0; step < 3; ++step) {
      const std::string when = "step " + std::to_string(step);
      auto generator = at::detail::createCPUGenerator(80 + static_cast<std::uint64_t>(step));
      const Batch batch = session.part({at::randn({12, 5, 12}, generator), at::randn({12, 5, 12}, generator)});
      session.model().loss(batch.input, batch.target).backward();
      session.see_gradients(when);
      if (engine != nullptr && engine->plan().units.front().strategy == "kFullShard") {
        EXPECT_EQ(resident_parameter_bytes(session.model()), 0U) << when << ": still gathered after backward";
      }
      session.step();
      session.see_parameters(when);
    }
  };
  return scenario;
}

// C09: a unit that is recomputed is called on two crops of different size before one backward. The second forward runs
// inside of backward, and a state "forward or backward or idle" per unit is left wrong by it. Gradients equal those
// without recomputation, and after backward nothing is gathered.
TEST(C09RecomputationOfAUnitUsedTwice, EqualsThePlainGraphAndFreesItsWeights) {
  for (const Recomputed recomputed : {Recomputed::kEachBlock, Recomputed::kAllNested, Recomputed::kSecondAlone})
    expect_equals_reference(crop_training(recomputed), all_layouts());
}

using InPlace = at::Tensor (*)(const at::Tensor& y);

// `caller` changes in place a view that the unit returns.
class ViewModel final : public RowModel {
 public:
  explicit ViewModel(InPlace caller) : RowModel("ViewModel"), caller_(caller) {
    unit = register_module("unit", Linear(kWidth, kWidth));
    head = register_module("head", Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) override { return head(at::tanh(caller_(unit(x)))); }
  Linear unit{nullptr}, head{nullptr};

 private:
  InPlace caller_;
};

at::Tensor twice_the_flat_view(const at::Tensor& y) { return y.view({-1}).mul_(2).view(y.sizes()); }
at::Tensor add_to_the_transposed(const at::Tensor& y) {
  y.t().add_(0.5);
  return y;
}
at::Tensor activate_a_part(const at::Tensor& y) {
  y.narrow(1, 2, 3).relu_();
  return y;
}
at::Tensor write_a_column_and_scale(const at::Tensor& y) {
  y.select(1, 4).copy_(y.select(1, 5).exp());
  y.view({-1, 2, kWidth / 2}).mul_(y.detach().view({-1, 2, kWidth / 2}).sigmoid());
  return y;
}

// C22: a caller multiplies in place what a unit returned as a view. That makes the node of the graph anew, and a hook
// on the old one is gone without a word: weights of size zero meet backward. All of it equals the reference.
TEST(C22InPlaceChangeOfAReturnedView, KeepsTheUnitsBackward) {
  for (const InPlace caller : {twice_the_flat_view, add_to_the_transposed, activate_a_part, write_a_column_and_scale}) {
    Scenario scenario{.make_model = seeded<ViewModel>(caller), .units = units<Linear>()};
    scenario.script = [](Session& session) {
      for (int step = 0; step < 3; ++step)
        train(session, rows(12, kWidth, kWidth, 30 + static_cast<std::uint64_t>(step)), "step " + std::to_string(step));
    };
    expect_equals_reference(scenario, all_layouts());
    scenario.prefetch = 0;
    expect_equals_reference(scenario);
  }
}

class MlpModel final : public RowModel {
 public:
  MlpModel() : RowModel("MlpModel") {
    trunk = register_module("trunk", Linear(16, 16));
    head = register_module("head", Linear(16, 4));
  }
  at::Tensor forward(const at::Tensor& x) override { return head(at::tanh(trunk(x))); }
  Linear trunk{nullptr}, head{nullptr};
};

// C32: gradients written into the place of the weights, to save memory. The second micro-batch's forward reads them as
// weights, and after the step all outputs are zero. Outputs between micro-batches and after the step are finite, vary
// and equal the reference.
TEST(C32ForwardBetweenAndAfterMicroBatches, ReadsWeightsAndNotGradients) {
  for (const int micro_batches : {1, 2, 3}) {
    Scenario scenario{.make_model = seeded<MlpModel>(), .units = units<Linear>()};
    scenario.script = [micro_batches](Session& session) {
      const auto look = [&](const std::string& when) {
        const at::NoGradGuard no_grad;
        const at::Tensor output = session.model_as<MlpModel>().forward(rows(6, 16, 4, 5).input);
        EXPECT_TRUE(output.isfinite().all().item<bool>()) << when;
        EXPECT_GT(output.std().item<double>(), 0.05) << when << ": constant";
        session.see(when + ": output", output);
      };
      for (int step = 0; step < 2; ++step) {
        for (int m = 0; m < micro_batches; ++m) {
          const Batch batch = session.part(rows(12, 16, 4, static_cast<std::uint64_t>(10 * step + m)));
          session.model().loss(batch.input, batch.target).backward();
          look("step " + std::to_string(step) + ", micro-batch " + std::to_string(m));
        }
        session.step();
        look("after step " + std::to_string(step));
        session.see_parameters("step " + std::to_string(step));
      }
    };
    expect_equals_reference(scenario, all_layouts());
  }
}

// The head alone is in the optimizer's groups.
TorchOptimizer adamw_of_the_head() {
  return {.make = [](const std::vector<ParameterShard>& shards) -> std::unique_ptr<torch::optim::Optimizer> {
            std::vector<at::Tensor> tensors;
            for (const ParameterShard& shard : shards) {
              if (shard.name.starts_with("head.")) tensors.push_back(shard.tensor);
            }
            return std::make_unique<torch::optim::AdamW>(tensors, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
          },
          .state = {}};
}

std::shared_ptr<MlpModel> make_mlp() {
  at::manual_seed(11);
  return std::make_shared<MlpModel>();
}

Batch mlp_batch(int step) { return rows(12, 16, 4, 20 + static_cast<std::uint64_t>(step)); }

Tensors head_trained_by_hand(int steps) {
  at::set_num_threads(1);
  const auto model = make_mlp();
  const auto optimizer = adamw_of_the_head().make(
      {{"head.weight", model->head->weight}, {"head.bias", model->head->bias}});
  for (int step = 0; step < steps; ++step) {
    const Batch batch = mlp_batch(step);
    model->loss(batch.input, batch.target).backward();
    optimizer->step();
    model->zero_grad();
  }
  return parameters_of(*model);
}

// C28: an optimizer that is given the head's weights only, while the trunk gets gradients all the same. Groups made
// anew from the module tree would train both. The trunk keeps its bits and has no state, through a save and a resume
// too.
TEST(C28OptimizerOfAPart, LeavesTheRestAsItIs) {
  const Tensors start = parameters_of(*make_mlp()), expected = head_trained_by_hand(4);
  ASSERT_FALSE(at::equal(start.at("head.weight"), expected.at("head.weight")));
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(name_of(layout));
    const TempDir dir;
    run_ranks(layout.world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const ShardOptions options{
          .units = units<Linear>(), .strategy = layout.strategy, .shard_group = layout.shard_group};
      for (const bool resumed : {false, true}) {
        const auto model = in_turn(make_mlp);
        Engine engine = shard(context, model, options);
        Optimizer optimizer = engine.optimizer(adamw_of_the_head());
        if (resumed) {
          ASSERT_EQ(engine.resume(dir / "runs"), 2);
        }
        for (int step = resumed ? 2 : 0; step < 4; ++step) {
          const Batch batch = part_of(mlp_batch(step), context.rank(), context.world_size());
          model->loss(batch.input, batch.target).backward();
          optimizer.step();
          if (!resumed && step == 1) engine.save(dir / "runs");
        }
        for (const auto& [name, value] : parameters_of(*model)) {
          const bool is_trained = name.starts_with("head.");
          expect_equal(value, expected.at(name), is_trained ? 2e-6 : 0, is_trained ? 2e-5 : 0, name);
        }
        for (const ShardView& view : engine.shard_views()) {
          EXPECT_TRUE(view.kind != ShardKind::kOptimizer || view.name.find("trunk.") == std::string::npos) << view.name;
        }
      }
    });
  }
}

// The same with the engine's own optimizers: a group whose rate and decay are zero.
TEST(C28OptimizerOfAPart, LeavesAGroupOfRateZeroAsItIs) {
  const ParameterGroups kHeadOnly = {
      {.matches = [](const std::string& name, std::int64_t) { return name.starts_with("trunk."); },
       .weight_decay = 0.0,
       .lr_scale = 0}};
  for (const bool adamw : {true, false}) {
    Scenario scenario{.make_model = seeded<MlpModel>(), .units = units_named({"head"})};
    if (adamw) {
      scenario.optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1, .groups = kHeadOnly};
    } else {
      scenario.optimizer = SGD{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .groups = kHeadOnly};
    }
    scenario.script = [](Session& session) {
      const Tensors start = parameters_of(session.model());
      for (int step = 0; step < 4; ++step) train(session, mlp_batch(step), "step " + std::to_string(step));
      for (const auto& [name, value] : parameters_of(session.model()))
        EXPECT_EQ(at::equal(value, start.at(name)), name.starts_with("trunk.")) << name;
    };
    expect_equals_reference(scenario, all_layouts());
  }
}

}  // namespace
}  // namespace fsdp::testing
