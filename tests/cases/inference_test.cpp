// Passes without gradients, before, between and after training steps: right every time, and harmless to what comes
// after.
#include <gtest/gtest.h>

#include <ostream>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include "tests/cases/case_support.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

struct Kind {
  const char* name;
  std::function<std::shared_ptr<LossModel>()> make_model;
  Units units;
  std::function<Batch(int)> batch;
};
void PrintTo(const Kind& value, std::ostream* stream) { *stream << value.name; }

Kind stack() {
  return {"Stack", seeded<StackModel>(5, 13), units<Linear>(),
          [](int k) { return rows(12, 13, 13, 500 + static_cast<std::uint64_t>(k)); }};
}

Kind mixed() {
  return {"Mixed", seeded<MixedModel>(), units<Block, torch::nn::LSTM, torch::nn::Conv1d>(),
          [](int k) { return MixedModel::batch(12, 500 + static_cast<std::uint64_t>(k)); }};
}

std::string name_of(const ::testing::TestParamInfo<Kind>& test) { return test.param.name; }

// What the model says about a whole batch, which all ranks evaluate.
at::Tensor evaluate(Session& session, const Batch& whole) { return session.model().loss(whole.input, whole.target); }

Scenario scenario_of(const Kind& kind, std::function<void(Session&)> script) {
  return {.make_model = kind.make_model, .script = std::move(script), .units = kind.units};
}

class C25RepeatedInference : public ::testing::TestWithParam<Kind> {};

// C25: in evaluation without gradients, the same batch four times. A release after forward that frees or overwrites the
// only copy makes the second pass differ from the first. All four have the same bits, and training goes on as if
// nothing had been.
TEST_P(C25RepeatedInference, GivesTheSameBitsFourTimesAndLeavesTrainingAlone) {
  const Kind& kind = GetParam();
  for (const int prefetch : {0, 1, 2}) {
    SCOPED_TRACE("prefetch " + std::to_string(prefetch));
    Scenario scenario = scenario_of(kind, [&](Session& session) {
      for (int step = 0; step < 4; ++step) {
        const std::string when = "step " + std::to_string(step);
        session.model().eval();
        {
          const at::NoGradGuard no_grad;
          const at::Tensor first = evaluate(session, kind.batch(90));
          session.see(when + ": evaluation", first);
          for (int pass = 1; pass < 4; ++pass)
            EXPECT_TRUE(at::equal(evaluate(session, kind.batch(90)), first)) << when << ", pass " << pass;
        }
        session.model().train();
        train(session, kind.batch(step), when);
      }
    });
    scenario.prefetch = prefetch;
    expect_equals_reference(scenario);
  }
}

// Evaluation between a forward and its backward, and between micro-batches.
TEST_P(C25RepeatedInference, InTheMiddleOfAStepLeavesItsGradientsAlone) {
  const Kind& kind = GetParam();
  expect_equals_reference(scenario_of(kind, [&](Session& session) {
    for (int step = 0; step < 3; ++step) {
      const std::string when = "step " + std::to_string(step);
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        const Batch batch = session.part(kind.batch(10 * step + micro_batch));
        const at::Tensor loss = session.model().loss(batch.input, batch.target);
        {
          const at::NoGradGuard no_grad;
          session.see(when + ": evaluation " + std::to_string(micro_batch), evaluate(session, kind.batch(90)));
        }
        loss.backward();
      }
      session.see_gradients(when);
      session.step();
    }
    session.see_parameters("end");
  }));
}

INSTANTIATE_TEST_SUITE_P(Models, C25RepeatedInference, ::testing::Values(stack(), mixed()), name_of);

class C26InferenceMode : public ::testing::TestWithParam<Kind> {};

void infer(Session& session, const Kind& kind, const std::string& when) {
  const c10::InferenceMode guard;
  session.see(when + ": inference", evaluate(session, kind.batch(90)));
}

void train_steps(Session& session, const Kind& kind, int first, int count) {
  for (int step = first; step < first + count; ++step) train(session, kind.batch(step), "step " + std::to_string(step));
}

// C26: the model's first pass runs under LibTorch's inference-mode guard. Buffers that an engine makes lazily are
// inference tensors then, which autograd refuses later. Training afterwards equals the reference.
TEST_P(C26InferenceMode, BeforeTheFirstStepLeavesTrainingAlone) {
  const Kind& kind = GetParam();
  expect_equals_reference(scenario_of(kind, [&](Session& session) {
    infer(session, kind, "start");
    train_steps(session, kind, 0, 3);
    infer(session, kind, "end");
    train_steps(session, kind, 3, 2);
  }));
}

TEST_P(C26InferenceMode, AroundShardLeavesTrainingAlone) {
  const Kind& kind = GetParam();
  Scenario scenario = scenario_of(kind, [&](Session& session) {
    infer(session, kind, "start");
    train_steps(session, kind, 0, 3);
  });
  scenario.shard_in_inference_mode = true;
  // The gradient of a key's bias is zero but for rounding, which differs between machines; beside this eps it is nothing.
  scenario.optimizer = AdamW{.lr = 1e-2, .eps = 1e-3};
  expect_equals_reference(scenario);
}

TEST_P(C26InferenceMode, AroundALoadLeavesTrainingAlone) {
  const Kind& kind = GetParam();
  const TempDir dir;
  for (const bool consolidated : {false, true}) {
    expect_equals_reference(scenario_of(kind, [&](Session& session) {
      train_steps(session, kind, 0, 2);
      {
        const c10::InferenceMode guard;
        if (consolidated) {
          session.consolidate_and_restart(dir / "model.safetensors");
        } else {
          session.save_and_restart(dir / "runs");
        }
      }
      infer(session, kind, "loaded");
      train_steps(session, kind, 2, 3);
    }));
  }
}

// zero_grad and the reading of gradients too may be called under the guard.
TEST_P(C26InferenceMode, AroundReadsOfGradientsLeavesTrainingAlone) {
  const Kind& kind = GetParam();
  expect_equals_reference(scenario_of(kind, [&](Session& session) {
    for (int step = 0; step < 3; ++step) {
      const std::string when = "step " + std::to_string(step);
      const Batch batch = session.part(kind.batch(step));
      session.model().loss(batch.input, batch.target).backward();
      {
        const c10::InferenceMode guard;
        session.see_gradients(when);
        if (step == 0) session.zero_grad();
      }
      session.model().loss(batch.input, batch.target).backward();
      session.see_gradients(when + ", again");
      session.step();
    }
    session.see_parameters("end");
  }));
}

INSTANTIATE_TEST_SUITE_P(Models, C26InferenceMode, ::testing::Values(stack(), mixed()), name_of);

}  // namespace
}  // namespace fsdp::testing
