// What parameters are: frozen, tied, in option groups, without dimensions. Flat buffers must not make them forget it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include <ATen/ATen.h>
#include <fsdp/error.h>
#include <fsdp/testing.h>
#include <nlohmann/json.hpp>

#include "tests/cases/case_support.h"
#include "tests/support/temp_dir.h"

namespace fsdp::testing {
namespace {

using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using torch::nn::Linear;

constexpr std::int64_t kWidth = 8;

Batch batch_of(int step) { return rows(12, kWidth, kWidth, 300 + static_cast<std::uint64_t>(step)); }

struct NetImpl final : torch::nn::Module {
  NetImpl() : trunk(register_module("trunk", Linear(kWidth, 5))), head(register_module("head", Linear(5, kWidth))) {}
  Linear trunk{nullptr}, head{nullptr};
};
TORCH_MODULE(Net);

enum class Frozen { kNothing, kTrunk, kBiases };

class FrozenModel final : public RowModel {
 public:
  explicit FrozenModel(Frozen frozen) : RowModel("FrozenModel") {
    net = register_module("net", Net());
    for (const auto& item : net->named_parameters()) {
      const bool is_bias = item.value().dim() == 1, in_trunk = item.key().rfind("trunk.", 0) == 0;
      if ((frozen == Frozen::kTrunk && in_trunk) || (frozen == Frozen::kBiases && is_bias))
        item.value().requires_grad_(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) override { return net->head(at::tanh(net->trunk(x))); }
  Net net{nullptr};
};

const Units kTogether = units_named({"net"}), kApart = units_named({"net.trunk", "net.head"});

Scenario frozen_training(Frozen frozen, const Units& units) {
  Scenario scenario{
      .make_model = seeded<FrozenModel>(frozen), .units = units, .optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1}};
  scenario.script = [](Session& session) {
    session.see_parameters("start");
    for (int step = 0; step < 10; ++step) train(session, batch_of(step), "step " + std::to_string(step));
    if (session.engine() == nullptr) return;
    for (const ShardView& view : session.engine()->shard_views()) {
      if (view.kind != ShardKind::kOptimizer) continue;
      const std::string parameter = view.name.substr(view.name.find('.') + 1);
      EXPECT_TRUE(session.model().named_parameters()[parameter].requires_grad())
          << view.name << ": optimizer state of a frozen parameter";
    }
  };
  return scenario;
}

// C23: frozen parameters beside trained ones, each in its own unit or all in one, under AdamW with weight decay. Frozen
// values keep their bits, trained ones equal the reference, and only trained ones have optimizer state.
TEST(C23FrozenParameters, KeepTheirBitsInAnyUnit) {
  for (const Frozen frozen : {Frozen::kTrunk, Frozen::kBiases}) {
    for (const Units& units : {kTogether, kApart}) {
      const Scenario scenario = frozen_training(frozen, units);
      const Tensors expected = run_plain(scenario);
      for (const int world_size : {1, 2, 3}) {
        const Tensors seen = run_sharded(scenario, world_size);
        expect_same_seen(seen, expected);
        for (const auto& item : FrozenModel(frozen).named_parameters()) {
          const at::Tensor& start = seen.at(parameter_name("start", item.key()));
          EXPECT_EQ(at::equal(seen.at(parameter_name("step 9", item.key())), start), !item.value().requires_grad())
              << item.key();
        }
      }
    }
  }
}

// Freezing after sharding counts from the next backward on, and may be taken back.
TEST(C23FrozenParameters, MayBeFrozenAfterShardingForSomeSteps) {
  for (const Units& units : {kTogether, kApart}) {
    Scenario scenario{.make_model = seeded<FrozenModel>(Frozen::kNothing),
                      .units = units,
                      .optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1}};
    scenario.script = [](Session& session) {
      auto& model = session.model_as<FrozenModel>();
      for (int step = 0; step < 10; ++step) {
        const bool trains = step < 3 || step > 6;
        for (const at::Tensor& p : model.net->trunk->parameters()) p.requires_grad_(trains);
        train(session, batch_of(step), "step " + std::to_string(step));
      }
    };
    expect_equals_reference(scenario);
  }
}

// The other way round there is no room for a gradient: a plain refusal.
TEST(C23FrozenParameters, AreRefusedByNameWhenTrainedAfterSharding) {
  for (const int world_size : {1, 2}) {
    run_ranks(world_size, [](const Context& context) {
      auto model = std::make_shared<FrozenModel>(Frozen::kTrunk);
      Engine engine = shard(context, model, {.units = kTogether});
      Optimizer optimizer = engine.optimizer(SGD{});
      model->net->trunk->weight.requires_grad_(true);
      const Batch batch = part_of(batch_of(0), context.rank(), context.world_size());
      try {
        model->loss(batch.input, batch.target).backward();
        optimizer.step();
        ADD_FAILURE() << "nothing was refused";
      } catch (const InvalidArgument& error) {
        EXPECT_THAT(error.what(), HasSubstr("net.trunk.weight"));
      }
    });
  }
}

struct TiedHeadImpl final : torch::nn::Module {
  explicit TiedHeadImpl(const at::Tensor& tied) : weight(register_parameter("weight", tied)) {}
  at::Tensor weight;
};
TORCH_MODULE(TiedHead);

// Token in, token out, through one weight that has three names: two registered tensors and a module registered twice.
class TiedModel final : public LossModel {
 public:
  TiedModel(std::int64_t tokens, std::int64_t width) : LossModel("TiedModel") {
    embedding = register_module("embedding", torch::nn::Embedding(tokens, width));
    middle = register_module("middle", Linear(width, width));
    head = register_module("head", TiedHead(embedding->weight));
    register_module("alias", embedding);
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override {
    return at::cross_entropy_loss(at::tanh(middle(embedding(input))).matmul(head->weight.t()), target);
  }
  torch::nn::Embedding embedding{nullptr};
  Linear middle{nullptr};
  TiedHead head{nullptr};
};

void expect_tied(Session& session) {
  const auto parameters = session.model().named_parameters();
  EXPECT_TRUE(parameters["head.weight"].is_same(parameters["embedding.weight"]));
  EXPECT_TRUE(at::equal(parameters["head.weight"].detach().clone(), parameters["embedding.weight"].detach().clone()));
  if (session.engine() == nullptr) return;
  std::vector<std::string> names;
  for (const ShardView& view : session.engine()->shard_views()) {
    if (view.name.find("middle.") == std::string::npos) names.push_back(view.name);
  }
  EXPECT_THAT(names, Each(EndsWith("embedding.weight")));
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size())
      << "the weight counts more than once";
}

Scenario tied_training(std::int64_t tokens, std::int64_t width, const Units& units) {
  return {.make_model = seeded<TiedModel>(tokens, width), .units = units};
}

Batch token_batch(std::int64_t tokens, int step) {
  auto generator = at::detail::createCPUGenerator(400 + static_cast<std::uint64_t>(step));
  return {at::randint(0, tokens, {12}, generator, at::kLong), at::randint(0, tokens, {12}, generator, at::kLong)};
}

// C24: an embedding tied to the output layer, one tensor under several names. It is one parameter: its elements are
// stepped once, its gradient is the sum of its uses, and the names go on sharing memory after sharding, steps, save and
// load.
TEST(C24TiedParameter, IsOneParameterThroughStepsSaveAndLoad) {
  const TempDir dir;
  for (const auto& [tokens, width] : std::initializer_list<std::pair<std::int64_t, std::int64_t>>{{10, 4}, {7, 13}}) {
    for (const Units& units : {units_named({"embedding", "head"}), units_named({"middle"})}) {
      for (const bool adamw : {true, false}) {
        Scenario scenario = tied_training(tokens, width, units);
        if (adamw) {
          scenario.optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1};
        } else {
          scenario.optimizer = SGD{.lr = 0.1, .momentum = 0.9};
        }
        scenario.script = [&, count = tokens](Session& session) {
          expect_tied(session);
          for (int step = 0; step < 4; ++step) {
            train(session, token_batch(count, step), "step " + std::to_string(step));
            expect_tied(session);
            if (step == 1) session.save_and_restart(dir / "runs");
          }
        };
        expect_equals_reference(scenario);
      }
    }
  }
}

TEST(C24TiedParameter, IsOneParameterInAConsolidatedFile) {
  const TempDir dir;
  Scenario scenario = tied_training(10, 4, units_named({"embedding", "head"}));
  scenario.script = [&](Session& session) {
    for (int step = 0; step < 4; ++step) {
      train(session, token_batch(10, step), "step " + std::to_string(step));
      if (step == 1) session.consolidate_and_restart(dir / "model.safetensors");
    }
  };
  expect_equals_reference(scenario);
}

class NormModel final : public RowModel {
 public:
  NormModel() : RowModel("NormModel") {
    up = register_module("up", Linear(kWidth, 11));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({11})));
    down = register_module("down", Linear(11, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) override { return down(norm(up(x))); }
  Linear up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

const ParameterGroups kNoDecayOfVectors = {
    {.matches = [](const std::string&, std::int64_t ndim) { return ndim <= 1; }, .weight_decay = 0.0}};

// C27: weights decay, biases and norms do not. All gradients are zero (which is not the same as none) and lr is 1, so a
// step of AdamW is the decay alone: weights are 0.9 of what they were, vectors keep their bits, also after save and
// load. A flat buffer given to the optimizer as one parameter could have one setting only.
TEST(C27OptionGroups, DecayWeightsAndNothingElse) {
  const TempDir dir;
  for (const Units& units :
       {units_named({"up", "norm", "down"}),
        units_if([](const std::string&name, const torch::nn::Module&) { return name == "norm"; })}) {
    Scenario scenario{.make_model = seeded<NormModel>(),
                      .units = units,
                      .optimizer = AdamW{.lr = 1, .weight_decay = 0.1, .groups = kNoDecayOfVectors}};
    scenario.script = [&](Session& session) {
      session.see_parameters("start");
      for (int step = 1; step <= 2; ++step) {
        (session.model_as<NormModel>().forward(session.part(batch_of(0)).input).sum() * 0).backward();
        session.step();
        session.see_parameters("step " + std::to_string(step));
        if (step == 1) session.save_and_restart(dir / "runs");
      }
    };
    for (const int world_size : {1, 2, 3}) {
      const Tensors seen = run_sharded(scenario, world_size);
      for (const auto& item : NormModel().named_parameters()) {
        const at::Tensor& start = seen.at(parameter_name("start", item.key()));
        const bool decays = item.value().dim() == 2;
        const double tolerance = decays ? 1e-6 : 0;
        expect_equal(seen.at(parameter_name("step 1", item.key())), decays ? start * 0.9 : start, 0, tolerance,
                     item.key());
        expect_equal(seen.at(parameter_name("step 2", item.key())), decays ? start * 0.81 : start, 0, tolerance,
                     item.key());
      }
    }
  }
}

TEST(C27OptionGroups, KeepTheirOwnDecayAndRateWhileTraining) {
  const TempDir dir;
  const ParameterGroups groups = {
      {.matches = [](const std::string& name, std::int64_t) { return name.rfind("norm.", 0) == 0; },
       .weight_decay = 0.0,
       .lr_scale = 0.25},
      {.matches = [](const std::string&, std::int64_t ndim) { return ndim <= 1; }, .weight_decay = 0.0, .lr_scale = 2},
      {.matches = [](const std::string& name, std::int64_t) { return name == "down.weight"; }, .weight_decay = 0.5}};
  for (const bool adamw : {true, false}) {
    Scenario scenario{.make_model = seeded<NormModel>(), .units = units<Linear>()};
    if (adamw) {
      scenario.optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1, .groups = groups};
    } else {
      scenario.optimizer = SGD{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.1, .groups = groups};
    }
    scenario.script = [&](Session& session) {
      for (int step = 0; step < 5; ++step) {
        train(session, batch_of(step), "step " + std::to_string(step));
        if (step == 2) session.save_and_restart(dir / "runs");
      }
    };
    expect_equals_reference(scenario);
  }
}

struct ScaleImpl final : torch::nn::Module {
  ScaleImpl() : value(register_parameter("value", at::scalar_tensor(1.5))) {}
  at::Tensor value;
};
TORCH_MODULE(Scale);

// A scalar beside other parameters of the root, and one that is a unit of its own.
class TemperatureModel final : public RowModel {
 public:
  TemperatureModel() : RowModel("TemperatureModel") {
    temperature = register_parameter("temperature", at::scalar_tensor(0.7));
    fc = register_module("fc", Linear(kWidth, kWidth));
    scale = register_module("scale", Scale());
  }
  at::Tensor forward(const at::Tensor& x) override { return at::tanh(fc(x)) * scale->value / temperature; }
  at::Tensor temperature;
  Linear fc{nullptr};
  Scale scale{nullptr};
};

Scenario scalar_training(std::function<void(Session&, int)> after_step) {
  Scenario scenario{.make_model = seeded<TemperatureModel>(), .units = units<Linear, Scale>()};
  scenario.script = [after_step = std::move(after_step)](Session& session) {
    for (int step = 0; step < 5; ++step) {
      train(session, batch_of(step), "step " + std::to_string(step), {.max_grad_norm = 0.2});
      after_step(session, step);
    }
  };
  return scenario;
}

nlohmann::json header_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::uint64_t size = 0;
  stream.read(reinterpret_cast<char*>(&size), sizeof(size));
  std::string header(size, '\0');
  stream.read(header.data(), static_cast<std::streamsize>(size));
  return nlohmann::json::parse(header);
}

// C29: a learnable scalar of shape []. It trains, is clipped, saved and loaded in both forms, and is still of shape []
// and not [1]. Most ranks own no element of it.
TEST(C29ScalarParameter, KeepsItsShapeThroughBothFormsOfCheckpoint) {
  const TempDir dir;
  const Scenario scenario = scalar_training([&](Session& session, int step) {
    if (step == 1) session.save_and_restart(dir / "runs");
    if (step == 3) session.consolidate_and_restart(dir / "model.safetensors");
    EXPECT_EQ(session.model_as<TemperatureModel>().temperature.dim(), 0);
  });
  expect_equals_reference(scenario, {1, 2, 4});
  const nlohmann::json header = header_of(dir / "model.safetensors");
  for (const char* name : {"temperature", "scale.value"}) {
    EXPECT_EQ(header.at(name).at("shape"), nlohmann::json::array()) << name;
  }
}

TEST(C29ScalarParameter, KeepsItsAdamStateThroughASave) {
  const TempDir dir;
  Scenario scenario = scalar_training([&](Session& session, int step) {
    if (step == 1 || step == 3) session.save_and_restart(dir / "runs");
  });
  scenario.optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1};
  expect_equals_reference(scenario, {1, 2, 4});
}

}  // namespace
}  // namespace fsdp::testing
