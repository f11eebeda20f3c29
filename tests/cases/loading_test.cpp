// Loading: again and again, into a run with other rates, from a file of another model or of another format.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/serialize.h>
#include <nlohmann/json.hpp>

#include <fsdp/checkpoint.h>
#include <fsdp/testing.h>

#include "tests/behaviour/function_model.h"
#include "tests/cases/case_support.h"
#include "tests/support/counting_allocator.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Linear;

constexpr std::int64_t kWidth = 48;

Batch batch_of(int step) { return rows(12, kWidth, kWidth, 40 + static_cast<std::uint64_t>(step)); }

class C83LoadedAgainAndAgain : public ::testing::TestWithParam<Layout> {
 protected:
  static void SetUpTestSuite() { CountingAllocator::install(); }
};

// Elements of optimizer state, of all ranks and copies.
std::size_t state_elements(const Engine& engine) {
  std::size_t elements = 0;
  for (const ShardView& view : engine.shard_views()) {
    if (view.kind == ShardKind::kOptimizer) elements += static_cast<std::size_t>(view.end - view.begin);
  }
  return elements;
}

// C83: a loader that appends to the optimizer's buffers, where it should replace them: twenty loads of one checkpoint
// leave twenty states. Memory and state are those of the second load, and the steps after the last equal a run that was
// never interrupted.
TEST_P(C83LoadedAgainAndAgain, KeepsOneStateAndItsMemory) {
  CountingAllocator& allocator = CountingAllocator::install();
  const TempDir dir;
  Scenario scenario{.make_model = seeded<StackModel>(3, kWidth),
                    .units = units<Linear>(),
                    .optimizer = AdamW{.lr = 1e-2},
                    .strategy = GetParam().strategy,
                    .shard_group = GetParam().shard_group};
  scenario.script = [&](Session& session) {
    for (int step = 0; step < 3; ++step) train(session, batch_of(step), "step " + std::to_string(step));
    if (session.engine() != nullptr) {
      Engine& engine = *session.engine();
      const Context& context = *session.context();
      engine.save(dir / "runs");
      engine.consolidate(dir / "model.safetensors");
      std::size_t live = 0;
      const std::size_t total = engine.memory().total_bytes(), elements = state_elements(engine);
      for (int load = 1; load <= 20; ++load) {
        engine.load_consolidated(dir / "model.safetensors");
        EXPECT_EQ(engine.resume(dir / "runs"), 3);
        context.communicator().barrier();
        if (load == 2) live = allocator.live_bytes();
        if (load > 2) {
          EXPECT_EQ(allocator.live_bytes(), live) << "tensors, after load " << load;
        }
        EXPECT_EQ(engine.memory().total_bytes(), total) << load;
        EXPECT_EQ(state_elements(engine), elements) << load;
        context.communicator().barrier();
      }
    }
    for (int step = 3; step < 5; ++step) train(session, batch_of(step), "step " + std::to_string(step));
  };
  expect_same_seen(run_sharded(scenario, GetParam().world_size), run_plain(scenario));
}
INSTANTIATE_TEST_SUITE_P(Grid, C83LoadedAgainAndAgain, ::testing::ValuesIn(all_layouts()),
                         [](const auto& tested) { return name_of(tested.param); });

// Each weight's gradient is 1.
struct UnitGradient final : torch::nn::Module {
  UnitGradient() : torch::nn::Module("UnitGradient") { fc = register_module("fc", Linear(5, 3)); }
  at::Tensor loss() const { return fc->weight.sum() + fc->bias.sum(); }
  Linear fc{nullptr};
};

// The same, where the loop has set the rate itself: set_lr, betas, weight decay and momentum are those of the checkpoint,
// whatever the resumed run's optimizer was made with.
TEST(C84DecayedRate, IsTheOneThatWasSet) {
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(name_of(layout));
    const TempDir dir;
    run_ranks(layout.world_size, [&](const Context& context) {
      const auto make_engine = [&](const std::shared_ptr<UnitGradient>& model) {
        return shard(context, model,
                     {.units = units<Linear>(), .strategy = layout.strategy, .shard_group = layout.shard_group});
      };
      const auto step = [](UnitGradient& model, Optimizer& optimizer) {
        const Tensors before = parameters_of(model);
        model.loss().backward();
        optimizer.step();
        Tensors moved = parameters_of(model);
        for (auto& [name, value] : moved) value = before.at(name) - value;
        return moved;
      };
      // Saves after one step of `saved` at a set rate; a run made with `given` then moves as the first one would have.
      const auto expect_restored = [&](const auto& saved, const auto& given, const char* run) {
        const auto first = in_turn([] { return std::make_shared<UnitGradient>(); });
        Engine saving = make_engine(first);
        Optimizer optimizer = saving.optimizer(saved);
        step(*first, optimizer);
        optimizer.set_lr(0.01);
        saving.save(dir / run);
        const Tensors expected = step(*first, optimizer);
        const auto second = in_turn([] { return std::make_shared<UnitGradient>(); });
        Engine resuming = make_engine(second);
        Optimizer resumed = resuming.optimizer(given);
        ASSERT_EQ(resuming.resume(dir / run), 1);
        EXPECT_EQ(resumed.lr(), 0.01);
        for (const auto& [name, value] : step(*second, resumed)) expect_equal(value, expected.at(name), 0, 0, name);
        const auto third = in_turn([] { return std::make_shared<UnitGradient>(); });
        Engine keeping = make_engine(third);
        Optimizer kept = keeping.optimizer(given);
        keeping.resume(dir / run, {.optimizer_settings = false});
        EXPECT_EQ(kept.lr(), given.lr);
      };
      expect_restored(SGD{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1}, SGD{.lr = 0.5, .momentum = 0.2}, "sgd");
      expect_restored(AdamW{.lr = 0.1, .betas = {0.8, 0.9}, .eps = 1e-3, .weight_decay = 0.3}, AdamW{.lr = 0.5},
                      "adamw");
      expect_restored(Adam{.lr = 0.1, .betas = {0.8, 0.9}, .eps = 1e-3, .weight_decay = 0.3}, Adam{.lr = 0.5}, "adam");
      expect_restored(Muon{.lr = 0.1, .momentum = 0.5, .weight_decay = 0.1, .others = {.lr = 0.3}}, Muon{.lr = 0.5},
                      "muon");
    });
  }
}

// C84: a checkpoint brings back the moments but not the rate that training had decayed to, and the resumed run starts
// with the first one again. A rate that follows a schedule is a function of the step, so the step after a resume moves
// each weight by the decayed rate, at any number of ranks.
TEST(C84DecayedRate, IsThatOfTheStepAfterAResume) {
  const TempDir dir;
  const auto make = [](Engine& engine, double momentum) {
    Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1, .momentum = momentum});
    optimizer.set_schedule(step_decay(/*every=*/4, 0.1));
    return optimizer;
  };
  for (const double momentum : {0.0, 0.5}) {
    const std::filesystem::path runs = dir / ("momentum" + std::to_string(momentum));
    for (const int saved_by : {1, 2, 3}) {
      run_ranks(saved_by, [&](const Context& context) {
        const auto model = in_turn([] { return std::make_shared<UnitGradient>(); });
        Engine engine = shard(context, model, {.units = units<Linear>()});
        Optimizer optimizer = make(engine, momentum);
        for (int step = 0; step < 4; ++step) {
          model->loss().backward();
          optimizer.step();
        }
        engine.save(runs);
      });
      for (const Layout& layout : all_layouts()) {
        SCOPED_TRACE(name_of(layout) + ", saved by " + std::to_string(saved_by));
        run_ranks(layout.world_size, [&](const Context& context) {
          const auto model = in_turn([] { return std::make_shared<UnitGradient>(); });
          Engine engine = shard(
              context, model,
              {.units = units<Linear>(), .strategy = layout.strategy, .shard_group = layout.shard_group});
          Optimizer optimizer = make(engine, momentum);
          ASSERT_EQ(engine.resume(runs), 4);
          const Tensors before = parameters_of(*model);
          model->loss().backward();
          optimizer.step();
          // Momentum after five gradients of 1: 1 + 0.5 + 0.25 + 0.125 + 0.0625.
          const double moved = 0.01 * (momentum == 0 ? 1 : 1.9375);
          for (const auto& [name, value] : parameters_of(*model))
            expect_equal(before.at(name) - value, at::full_like(value, moved), 1e-6, 0, name);
        });
      }
    }
  }
}

// Names two levels deep, in a variant that was saved and one that loads.
struct NestedImpl final : torch::nn::Module {
  explicit NestedImpl(bool saved) {
    common = register_parameter("common", at::randn({4, 4}));
    register_parameter("shaped", saved ? at::ones({3, 4}) : at::ones({4, 3}));
    register_parameter("typed", at::ones({5}, saved ? at::kFloat : at::kDouble));
    register_parameter(saved ? "surplus" : "wanting", at::ones({2}));
  }
  at::Tensor common;
};
TORCH_MODULE(Nested);

struct OuterModel final : torch::nn::Module {
  explicit OuterModel(bool saved) : torch::nn::Module("OuterModel") {
    block = register_module("block", torch::nn::ModuleDict());
    block->update({{"inner", std::make_shared<NestedImpl>(saved)}});
    head = register_module("head", Linear(4, 4));
  }
  torch::nn::ModuleDict block{nullptr};
  Linear head{nullptr};
};

// C88: a load of a file with one key too few, one too many, one of another shape and one of another type. An error that
// stops at the first of these, shows the last part of a name only, or comes on one rank after others have overwritten
// half of the model. Every rank throws, all dotted names are there, and the model has the values of before.
TEST(C88LoadOfAnotherModel, ListsEveryDottedNameOnEveryRankAndChangesNothing) {
  const auto tells_all = AllOf(HasSubstr("block.inner.surplus"), HasSubstr("block.inner.wanting"),
                               HasSubstr("block.inner.shaped"), HasSubstr("block.inner.typed"), HasSubstr("[3, 4]"),
                               HasSubstr("[4, 3]"), HasSubstr("F32"), HasSubstr("F64"));
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(name_of(layout));
    const TempDir dir;
    run_ranks(layout.world_size, [&](const Context& context) {
      const ShardOptions options{
          .units = units<Linear, Nested>(), .strategy = layout.strategy, .shard_group = layout.shard_group};
      const auto saved = in_turn([] { return std::make_shared<OuterModel>(true); });
      const auto loading = in_turn([] { return std::make_shared<OuterModel>(false); });
      Engine engine = shard(context, saved, options), other = shard(context, loading, options);
      engine.save(dir / "runs");
      engine.consolidate(dir / "model.safetensors");
      const Tensors before = parameters_of(*loading);
      EXPECT_THAT(text_of<CheckpointError>([&] { other.resume(dir / "runs"); }), tells_all);
      EXPECT_THAT(text_of<CheckpointError>([&] { other.load_consolidated(dir / "model.safetensors"); }), tells_all);
      for (const auto& [name, value] : parameters_of(*loading)) expect_equal(value, before.at(name), 0, 0, name);
    });
  }
}

// Several types and shapes, one of them [] and one empty.
struct ManyTypes final : torch::nn::Module {
  ManyTypes() : torch::nn::Module("ManyTypes") {
    register_parameter("single", at::randn({3, 5}));
    register_parameter("wide", at::randn({7}, at::kDouble));
    register_parameter("narrow", at::randn({2, 2, 2}).to(at::kBFloat16));
    register_parameter("half", at::randn({3}).to(at::kHalf));
    register_parameter("scalar", at::randn({}));
    register_parameter("empty", at::randn({0, 3}));
    register_parameter("order", at::arange(4, at::kLong), /*requires_grad=*/false);
  }
};

nlohmann::json header_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::uint64_t size = 0;
  stream.read(reinterpret_cast<char*>(&size), sizeof(size));
  std::string header(size, '\0');
  stream.read(header.data(), static_cast<std::streamsize>(size));
  return nlohmann::json::parse(header);
}

const std::map<std::string, DType> kTypes{
    {"single", DType::kFloat32}, {"wide", DType::kFloat64},  {"narrow", DType::kBFloat16}, {"half", DType::kFloat16},
    {"scalar", DType::kFloat32}, {"empty", DType::kFloat32}, {"order", DType::kInt64}};

// C93: a file that one side writes and the other's plain loader cannot read. The consolidated file is a safetensors
// file: its header has exactly the keys, shapes and types of the module, its bytes fill a module that no engine knows,
// and torch::load, which reads archives only, refuses it instead of making something of it.
TEST(C93ConsolidatedFile, FillsAPlainModuleWithExactKeysShapesAndTypes) {
  for (const Layout& layout : all_layouts()) {
    SCOPED_TRACE(name_of(layout));
    const TempDir dir;
    const std::filesystem::path file = dir / "model.safetensors";
    Tensors expected;
    run_ranks(layout.world_size, [&](const Context& context) {
      const auto model = in_turn([] { return std::make_shared<ManyTypes>(); });
      Engine engine = shard(context, model, {.strategy = layout.strategy, .shard_group = layout.shard_group});
      engine.consolidate(file);
      const Tensors values = parameters_of(*model);
      if (context.is_main()) expected = values;
    });
    const nlohmann::json header = header_of(file);
    EXPECT_EQ(header.size(), kTypes.size() + 1) << "keys and __metadata__";
    ManyTypes plain;
    std::vector<ShardView> views;
    for (auto& item : plain.named_parameters()) {
      at::Tensor& p = item.value();
      EXPECT_EQ(header.at(item.key()).at("shape").get<std::vector<std::int64_t>>(), p.sizes().vec()) << item.key();
      EXPECT_EQ(header.at(item.key()).at("dtype"), std::string(name_of(kTypes.at(item.key())))) << item.key();
      const at::NoGradGuard no_grad;
      p.zero_();
      views.push_back({.name = item.key(),
                       .dtype = kTypes.at(item.key()),
                       .shape = p.sizes().vec(),
                       .strides = p.strides().vec(),
                       .end = p.numel(),
                       .data = static_cast<std::byte*>(p.mutable_data_ptr())});
    }
    read_consolidated(file, views);
    for (const auto& [name, value] : parameters_of(plain)) expect_equal(value, expected.at(name), 0, 0, name);
    std::vector<at::Tensor> tensors;
    EXPECT_THROW(torch::load(tensors, file.string()), c10::Error);
  }
}

// The other way round: an archive of torch::save is refused on all ranks, by its name, and nothing is changed.
TEST(C93ConsolidatedFile, IsNotWhatTorchSaveWrites) {
  for (const int world_size : {1, 2, 3}) {
    const TempDir dir;
    torch::save(Linear(6, 6), (dir / "archive.pt").string());
    run_ranks(world_size, [&](const Context& context) {
      const Linear model = in_turn([] { return Linear(6, 6); });
      Engine engine = shard(context, model);
      const Tensors before = parameters_of(*model);
      EXPECT_THAT(text_of<CheckpointError>([&] { engine.load_consolidated(dir / "archive.pt"); }),
                  HasSubstr("archive.pt"));
      for (const auto& [name, value] : parameters_of(*model)) expect_equal(value, before.at(name), 0, 0, name);
    });
  }
}

}  // namespace
}  // namespace fsdp::testing
