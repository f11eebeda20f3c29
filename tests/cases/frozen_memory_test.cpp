// What frozen units cost: they are gathered for backward too, and no gradient of their own ever tells that it is over.
#include <gtest/gtest.h>

#include <ostream>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <fsdp/testing.h>

#include "tests/cases/case_support.h"
#include "tests/support/counting_allocator.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

constexpr std::int64_t kLayers = 8, kWidth = 128;
constexpr std::size_t kUnitBytes = (kWidth * kWidth + kWidth) * sizeof(float);

enum class Trained { kFirstUnit, kMiddleUnit, kBiasOfEachUnit, kNoUnit };
void PrintTo(Trained trained, std::ostream* out) {
  constexpr const char* kNames[] = {"FirstUnit", "MiddleUnit", "BiasOfEachUnit", "NoUnit"};
  *out << kNames[static_cast<int>(trained)];
}

// Its input is trained where no unit is.
class FrozenStack final : public RowModel {
 public:
  explicit FrozenStack(Trained trained) : RowModel("FrozenStack") {
    offset = register_parameter("offset", at::zeros({kWidth}), trained == Trained::kNoUnit);
    layers = register_module("layers", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < kLayers; ++i) {
      layers->push_back(Linear(kWidth, kWidth));
      auto& layer = *layers[static_cast<std::size_t>(i)]->as<Linear>();
      const bool is_adapter = (trained == Trained::kFirstUnit && i == 0) || (trained == Trained::kMiddleUnit && i == 4);
      layer.weight.requires_grad_(is_adapter);
      layer.bias.requires_grad_(is_adapter || trained == Trained::kBiasOfEachUnit);
    }
  }
  at::Tensor forward(const at::Tensor& input) override {
    at::Tensor x = input + offset;
    for (std::size_t i = 0; i < layers->size(); ++i) {
      x = at::tanh(layers[i]->as<Linear>()->forward(x));
      if (probe && x.requires_grad()) x.register_hook([this](const at::Tensor&) { probe(); });
    }
    return x;
  }
  at::Tensor offset;
  torch::nn::ModuleList layers{nullptr};
  std::function<void()> probe{};  // called between the units of backward
};

class C36FrozenUnits : public ::testing::TestWithParam<std::tuple<Trained, int>> {
 protected:
  static void SetUpTestSuite() { CountingAllocator::install(); }
};

// C36: seven frozen units of eight, and the trained one at the bottom, so that backward runs through all of them. What
// releases a unit when its gradient has come never releases a frozen one, and all eight are there at the end. At no
// moment of backward are more than two or three gathered, in the arena and not beside it; what is trained equals the
// reference, and what is frozen keeps its bits.
TEST_P(C36FrozenUnits, AreReleasedInBackwardAsTrainedOnesAre) {
  CountingAllocator& allocator = CountingAllocator::install();
  const auto [trained, prefetch] = GetParam();
  Scenario scenario{.make_model = seeded<FrozenStack>(trained), .units = units<Linear>(), .prefetch = prefetch};
  scenario.script = [&, arena_units = static_cast<std::size_t>(prefetch + 2)](Session& session) {
    auto& model = session.model_as<FrozenStack>();
    Engine* engine = session.engine();
    int probes = 0;
    if (engine != nullptr) {
      model.probe = [&probes, engine, arena_units] {
        ++probes;
        EXPECT_LE(engine->memory().resident_bytes, arena_units * kUnitBytes) << "probe " << probes;
      };
    }
    const auto meet = [&] {
      if (engine != nullptr) session.context()->communicator().barrier();
    };
    for (int step = 0; step < 4; ++step) {
      const Batch batch = session.part(rows(12, kWidth, kWidth, 20 + static_cast<std::uint64_t>(step)));
      const at::Tensor loss = session.model().loss(batch.input, batch.target);
      meet();
      const std::size_t before = allocator.live_bytes();
      if (engine == nullptr || session.context()->is_main()) allocator.reset_peak();
      meet();
      loss.backward();
      meet();
      if (engine != nullptr) {
        // A trained unit's gradient of each rank beside small activations; never the weights.
        const auto gradients = static_cast<std::size_t>(session.context()->world_size()) * kUnitBytes;
        EXPECT_LT(allocator.peak_bytes(), before + gradients + kUnitBytes) << "step " << step;
        const MemoryReport memory = engine->memory();
        EXPECT_LE(memory.arena_bytes, arena_units * (kUnitBytes + 1024));
        EXPECT_EQ(memory.overflows, 0) << "step " << step;
        EXPECT_EQ(memory.peak_overflow_bytes, 0U) << "step " << step;
      }
      meet();
      session.see_gradients("step " + std::to_string(step));
      // The frozen unit that backward used last stays in its slot until the step ends, as nothing told that it was.
      if (engine != nullptr) {
        EXPECT_LE(resident_parameter_bytes(model), (arena_units - 1) * kUnitBytes) << "after backward " << step;
      }
      session.step();
      if (engine != nullptr) {
        EXPECT_EQ(resident_parameter_bytes(model), 0U) << "after step " << step;
      }
      session.see_parameters("step " + std::to_string(step));
    }
    if (engine != nullptr) {
      EXPECT_GE(probes, 4 * (trained == Trained::kMiddleUnit ? 4 : 8));
    }
    model.probe = {};
  };
  const Tensors expected = run_plain(scenario);
  for (const int world_size : {1, 2, 4}) {
    SCOPED_TRACE("world size " + std::to_string(world_size));
    for (const int shard_group : {0, world_size == 4 ? 2 : 0}) {
      scenario.shard_group = shard_group;
      const Tensors seen = run_sharded(scenario, world_size);
      expect_same_seen(seen, expected);
      for (const auto& item : scenario.make_model()->named_parameters()) {
        const bool moved = !at::equal(seen.at(parameter_name("step 3", item.key())), item.value().detach());
        EXPECT_EQ(moved, item.value().requires_grad()) << item.key();
      }
    }
  }
}

// Strategies that keep parameters hold each frozen unit once, and no gradient or state for it.
TEST(C36FrozenUnitsOfEachStrategy, HaveNoGradientsAndNoState) {
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(name_of(layout));
    run_ranks(layout.world_size, [&](const Context& context) {
      at::set_num_threads(1);
      const auto model = in_turn([] { return std::make_shared<FrozenStack>(Trained::kFirstUnit); });
      Engine engine = shard(context, model,
                            {.units = units<Linear>(), .strategy = layout.strategy, .shard_group = layout.shard_group});
      Optimizer optimizer = engine.optimizer(AdamW{});
      for (int step = 0; step < 3; ++step) {
        const Batch batch = rows(4, kWidth, kWidth, static_cast<std::uint64_t>(step));
        model->loss(batch.input, batch.target).backward();
        optimizer.step();
      }
      const MemoryReport memory = engine.memory();
      EXPECT_LE(memory.gradient_shard_bytes, kUnitBytes + 4096);
      EXPECT_LE(memory.optimizer_bytes, 2 * kUnitBytes + 4096);
      EXPECT_LE(memory.parameter_shard_bytes, (kLayers + 1) * (kUnitBytes + 1024));
      EXPECT_EQ(memory.overflows, 0);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, C36FrozenUnits,
                         ::testing::Combine(::testing::Values(Trained::kFirstUnit, Trained::kMiddleUnit,
                                                              Trained::kBiasOfEachUnit, Trained::kNoUnit),
                                            ::testing::Values(0, 1)),
                         [](const auto& tested) {
                           return ::testing::PrintToString(std::get<0>(tested.param)) + "TrainedPrefetch" +
                                  std::to_string(std::get<1>(tested.param));
                         });

}  // namespace
}  // namespace fsdp::testing
