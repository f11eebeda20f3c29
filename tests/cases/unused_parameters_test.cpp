// Steps that use a part of the model only: what is unused is left alone, and never stays gathered.
#include <gtest/gtest.h>

#include <ostream>

#include <ATen/ATen.h>

#include "tests/cases/case_support.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

constexpr std::int64_t kWidth = 9;

Batch batch_of(int step) { return rows(12, kWidth, kWidth, 200 + static_cast<std::uint64_t>(step)); }

// One of two encoders, as `turn` says, with or without a stem before and a head after them.
class TurnsModel final : public RowModel {
 public:
  explicit TurnsModel(bool framed) : RowModel("TurnsModel") {
    encoders = register_module("encoders", torch::nn::ModuleList(Linear(kWidth, kWidth), Linear(kWidth, kWidth)));
    if (!framed) return;
    stem = register_module("stem", Linear(kWidth, kWidth));
    head = register_module("head", Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor encoded = at::tanh(encoder(turn).forward(stem ? at::tanh(stem(x)) : x));
    return head ? head(encoded) : encoded;
  }
  torch::nn::LinearImpl& encoder(std::size_t index) { return *encoders[index]->as<Linear>(); }

  std::size_t turn = 0;
  torch::nn::ModuleList encoders{nullptr};
  Linear stem{nullptr}, head{nullptr};
};

struct Turns {
  const char* name;
  std::vector<std::size_t> of_step;
};
void PrintTo(const Turns& value, std::ostream* stream) { *stream << value.name; }

class C19EncodersInTurn : public ::testing::TestWithParam<Turns> {};

// C19: two encoders, used in turn by step number, under AdamW with weight decay. The optimizer leaves an encoder
// without gradients alone, decay included, as the stock one does; and the unused encoder is sharded after backward,
// though it may have been gathered ahead.
TEST_P(C19EncodersInTurn, LeaveTheUnusedOneAloneAndSharded) {
  for (const bool framed : {false, true}) {
    for (const int prefetch : {0, 1, 2}) {
      Scenario scenario{.make_model = seeded<TurnsModel>(framed),
                        .units = units<Linear>(),
                        .optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1},
                        .prefetch = prefetch};
      scenario.script = [](Session& session) {
        auto& model = session.model_as<TurnsModel>();
        const std::vector<std::size_t>& turns = GetParam().of_step;
        for (std::size_t step = 0; step < turns.size(); ++step) {
          const std::string when = "step " + std::to_string(step);
          model.turn = turns[step];
          const Batch batch = session.part(batch_of(static_cast<int>(step)));
          model.loss(batch.input, batch.target).backward();
          session.see_gradients(when);
          if (session.engine() != nullptr) {
            EXPECT_EQ(resident_parameter_bytes(model.encoder(1 - model.turn)), 0U) << when << ": the unused encoder";
          }
          session.step();
          if (session.engine() != nullptr) {
            EXPECT_EQ(resident_parameter_bytes(model), 0U) << when;
          }
          session.see_parameters(when);
        }
      };
      SCOPED_TRACE("framed " + std::to_string(framed) + ", prefetch " + std::to_string(prefetch));
      expect_equals_reference(scenario);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, C19EncodersInTurn,
                         ::testing::Values(Turns{"Alternating", {0, 1, 0, 1, 0, 1}},
                                           Turns{"Switching", {0, 0, 0, 1, 1, 0}},
                                           Turns{"NeverTheSecond", {0, 0, 0, 0}}),
                         [](const auto& test) { return test.param.name; });

// A unit with two results.
struct PairImpl final : torch::nn::Module {
  PairImpl() : a(register_module("a", Linear(kWidth, kWidth))), b(register_module("b", Linear(kWidth, kWidth))) {}
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {a(x), b(at::tanh(x))}; }
  Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Pair);

class PairModel final : public LossModel {
 public:
  PairModel() : LossModel("PairModel") {
    trunk = register_module("trunk", Linear(kWidth, kWidth));
    pair = register_module("pair", Pair());
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    const auto [a, b] = pair->forward(at::tanh(trunk(input)));
    if (used == "a") return at::mse_loss(a, target);
    if (used == "b") return at::mse_loss(b, target);
    return at::mse_loss(a + b, target);
  }
  std::string used;
  Linear trunk{nullptr};
  Pair pair{nullptr};
};

// C20: a unit returns two results, and the loss takes one in this step, the other in the next, then both. An end of
// backward that waits for a gradient of each parameter of the unit never comes, or fails a check.
TEST(C20UnitWithTwoResults, FinishesWhicheverOfThemTheLossTakes) {
  for (const bool adamw : {false, true}) {
    Scenario scenario{.make_model = seeded<PairModel>()};
    if (adamw) scenario.optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1};
    scenario.script = [](Session& session) {
      int step = 0;
      for (const char* used : {"a", "b", "both", "b", "b", "a", "both"}) {
        session.model_as<PairModel>().used = used;
        train(session, batch_of(step), "step " + std::to_string(step) + " with " + used);
        ++step;
      }
    };
    scenario.units = units<Pair>();
    expect_equals_reference(scenario);
    scenario.units = units<Linear>();
    expect_equals_reference(scenario);
  }
}

TEST(C20UnitWithTwoResults, FinishesWhereMicroBatchesTakeOneEach) {
  Scenario scenario{.make_model = seeded<PairModel>(), .units = units<Pair>()};
  scenario.script = [](Session& session) {
    auto& model = session.model_as<PairModel>();
    for (int step = 0; step < 4; ++step) {
      for (const char* used : {"a", "b", "b"}) {
        model.used = used;
        const Batch batch = session.part(batch_of(step));
        model.loss(batch.input, batch.target).backward();
      }
      session.see_gradients("step " + std::to_string(step));
      session.step();
    }
    session.see_parameters("end");
  };
  expect_equals_reference(scenario);
}

enum class LossOf { kStash, kStashAndOutput, kInnerStash };

// Keeps hidden values in members; the loss is computed from those.
class StashModel final : public RowModel {
 public:
  explicit StashModel(LossOf the_source) : RowModel("StashModel"), source(the_source) {
    fc1 = register_module("fc1", Linear(kWidth, kWidth));
    fc2 = register_module("fc2", Linear(kWidth, kWidth));
    fc3 = register_module("fc3", Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) override {
    hidden = fc1(x);
    inner = fc2(at::tanh(hidden));
    return fc3(at::tanh(inner));
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    const at::Tensor output = forward(input);
    if (source == LossOf::kStash) return hidden.sum(1).mean();
    if (source == LossOf::kInnerStash) return at::mse_loss(inner, target);
    return at::mse_loss(output, target) + hidden.pow(2).mean();
  }
  LossOf source;
  at::Tensor hidden, inner;
  Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr};
};

// C21: the loss is computed from a tensor that the module stashed in a member, not from what forward returned. A gather
// in backward that is only triggered by hooks on returned tensors leaves the weights sharded there.
TEST(C21LossOfAStashedTensor, ReachesTheWeightsBehindIt) {
  for (const LossOf source : {LossOf::kStash, LossOf::kStashAndOutput, LossOf::kInnerStash}) {
    SCOPED_TRACE(static_cast<int>(source));
    Scenario scenario{.make_model = seeded<StashModel>(source), .units = units<Linear>()};
    scenario.script = [](Session& session) {
      for (int step = 0; step < 3; ++step) train(session, batch_of(step), "step " + std::to_string(step));
    };
    expect_equals_reference(scenario);
  }
}

TEST(C21LossOfAStashedTensor, ReachesThemLongAfterOtherForwards) {
  Scenario scenario{.make_model = seeded<StashModel>(LossOf::kInnerStash), .units = units<Linear>()};
  scenario.script = [](Session& session) {
    auto& model = session.model_as<StashModel>();
    for (int step = 0; step < 3; ++step) {
      const Batch batch = session.part(batch_of(step));
      model.forward(batch.input);
      const at::Tensor kept = model.inner;
      at::Tensor last = batch.input;
      for (int i = 0; i < 3; ++i) last = model.forward(last);
      (kept.pow(2).mean() + last.mean()).backward();
      session.see_gradients("step " + std::to_string(step));
      session.step();
    }
    session.see_parameters("end");
  };
  expect_equals_reference(scenario);
}

}  // namespace
}  // namespace fsdp::testing
