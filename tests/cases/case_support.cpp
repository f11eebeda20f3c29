#include "tests/cases/case_support.h"

#include <limits>
#include <optional>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace fsdp::testing {
namespace {

constexpr double kAbsolute = 1e-6, kRelative = 1e-5;

// A tied parameter once, under its first name.
std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::unordered_map<const void*, std::string> known;
  for (const auto& item : module.named_parameters()) {
    if (known.emplace(item.value().unsafeGetTensorImpl(), item.key()).second)
      parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

using TorchGroups = std::vector<torch::optim::OptimizerParamGroup>;

// LibTorch's option groups are lists of tensors; here each parameter is a group of its own.
template <class Options, class MakeOptions>
TorchGroups torch_groups(const torch::nn::Module& module, const Options& options, const MakeOptions& make_options) {
  TorchGroups groups;
  for (const auto& [name, tensor] : distinct_parameters(module)) {
    double lr = options.lr, weight_decay = options.weight_decay;
    for (const ParameterGroup& group : options.groups) {
      if (!group.matches(name, tensor.dim())) continue;
      lr *= group.lr_scale;
      weight_decay = group.weight_decay.value_or(weight_decay);
      break;
    }
    groups.emplace_back(std::vector<at::Tensor>{tensor}, make_options(lr, weight_decay));
  }
  return groups;
}

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(const torch::nn::Module& module,
                                                         const std::variant<SGD, AdamW>& optimizer) {
  if (const auto* adamw = std::get_if<AdamW>(&optimizer)) {
    return std::make_unique<torch::optim::AdamW>(torch_groups(module, *adamw, [&](double lr, double weight_decay) {
      auto options = std::make_unique<torch::optim::AdamWOptions>(lr);
      options->betas({adamw->betas[0], adamw->betas[1]}).eps(adamw->eps).weight_decay(weight_decay);
      return options;
    }));
  }
  const SGD& sgd = std::get<SGD>(optimizer);
  const torch::optim::SGDOptions defaults(sgd.lr);
  return std::make_unique<torch::optim::SGD>(
      torch_groups(module, sgd,
                   [&](double lr, double weight_decay) {
                     auto options = std::make_unique<torch::optim::SGDOptions>(lr);
                     options->momentum(sgd.momentum).weight_decay(weight_decay).nesterov(sgd.nesterov);
                     return options;
                   }),
      defaults);
}

class PlainSession final : public Session {
 public:
  explicit PlainSession(const Scenario& scenario)
      : Session(scenario.make_model()),
        adamw_(std::holds_alternative<AdamW>(scenario.optimizer)),
        optimizer_(torch_optimizer(*model_, scenario.optimizer)) {}

  Engine* engine() override { return nullptr; }
  const Context* context() const override { return nullptr; }
  Batch part(const Batch& whole) const override { return whole; }
  double mean(double value) const override { return value; }

  double step(const StepOptions& options) override {
    note_tiny_gradients();
    double norm = 0;
    if (options.max_grad_norm) {
      std::vector<at::Tensor> tensors;
      for (const auto& [name, tensor] : distinct_parameters(*model_)) tensors.push_back(tensor);
      norm = torch::nn::utils::clip_grad_norm_(tensors, *options.max_grad_norm);
    }
    optimizer_->step();
    optimizer_->zero_grad();
    return norm;
  }
  void zero_grad() override { optimizer_->zero_grad(); }
  void save_and_restart(const std::filesystem::path&) override {}
  void consolidate_and_restart(const std::filesystem::path&) override {}

  void see_gradients(const std::string& when) override {
    for (const auto& [name, tensor] : distinct_parameters(*model_)) {
      if (tensor.grad().defined()) see(gradient_name(when, name), tensor.grad());
    }
  }
  // Adam turns the rounding of a gradient near zero into a step of the size of lr: such elements are NaN here, which
  // stands for "any".
  void see_parameters(const std::string& when) override {
    for (const auto& item : model_->named_parameters()) {
      const auto history = gradients_.find(item.value().unsafeGetTensorImpl());
      at::Tensor value = item.value().detach();
      if (history != gradients_.end())
        value = value.masked_fill(history->second.was_tiny, std::numeric_limits<double>::quiet_NaN());
      see(parameter_name(when, item.key()), value);
    }
  }

 private:
  struct History {
    at::Tensor largest, was_tiny;  // by element: largest gradient so far; that was next to nothing at some step
  };

  void note_tiny_gradients() {
    constexpr double kTiny = 1e-4;
    if (!adamw_) return;
    for (const auto& [name, tensor] : distinct_parameters(*model_)) {
      if (!tensor.grad().defined()) continue;
      History& history = gradients_[tensor.unsafeGetTensorImpl()];
      if (!history.largest.defined())
        history = {at::zeros_like(tensor.grad()), at::zeros_like(tensor.grad(), at::kBool)};
      history.largest = at::maximum(history.largest, tensor.grad().abs());
      history.was_tiny = history.was_tiny | ((history.largest > 0) & (history.largest < kTiny));
    }
  }

  bool adamw_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unordered_map<const void*, History> gradients_;
};

class ShardedSession final : public Session {
 public:
  ShardedSession(const Scenario& scenario, const Context& context)
      : Session(nullptr), scenario_(scenario), context_(context) {
    start(make_model());
  }

  Engine* engine() override { return &*engine_; }
  const Context* context() const override { return &context_; }
  Batch part(const Batch& whole) const override { return part_of(whole, context_.rank(), context_.world_size()); }
  double mean(double value) const override { return context_.mean(value); }
  double step(const StepOptions& options) override { return optimizer_->step(options).grad_norm; }
  void zero_grad() override { optimizer_->zero_grad(); }

  void save_and_restart(const std::filesystem::path& dir) override {
    // A run at another world size may have left later steps in `dir`.
    const std::filesystem::path runs = dir / ("of-" + std::to_string(context_.world_size()));
    const std::int64_t saved = engine_->step();
    engine_->save(runs);
    start(make_other_model());
    EXPECT_EQ(engine_->resume(runs), saved);
  }
  void consolidate_and_restart(const std::filesystem::path& file) override {
    engine_->consolidate(file);
    start(make_other_model());
    engine_->load_consolidated(file);
  }

  void see_gradients(const std::string& when) override {
    for (const auto& [name, gradient] : assemble(context_, engine_->gradient_views()))
      see(gradient_name(when, name), gradient);
  }
  void see_parameters(const std::string& when) override {
    for (const auto& [name, value] : parameters_of(*model_)) see(parameter_name(when, name), value);
  }

 private:
  std::shared_ptr<LossModel> make_model() const {
    const c10::InferenceMode normal_mode(false);
    return in_turn(scenario_.make_model);
  }
  // Its values can only come from a checkpoint.
  std::shared_ptr<LossModel> make_other_model() const {
    auto model = make_model();
    const c10::InferenceMode normal_mode(false);
    const at::NoGradGuard no_grad;
    for (const at::Tensor& p : model->parameters()) p.zero_();
    return model;
  }
  void start(std::shared_ptr<LossModel> model) {
    optimizer_.reset();
    engine_.reset();
    model_ = std::move(model);
    const c10::InferenceMode mode(c10::InferenceMode::is_enabled() || scenario_.shard_in_inference_mode);
    engine_.emplace(shard(context_, model_,
                          {.units = scenario_.units,
                           .strategy = scenario_.strategy,
                           .shard_group = scenario_.shard_group,
                           .prefetch = scenario_.prefetch}));
    optimizer_.emplace(
        std::visit([this](const auto& options) { return engine_->optimizer(options); }, scenario_.optimizer));
  }

  const Scenario& scenario_;
  Context context_;
  std::optional<Engine> engine_;
  std::optional<Optimizer> optimizer_;
};

std::vector<std::string> names_of(const Tensors& tensors) {
  std::vector<std::string> names;
  for (const auto& item : tensors) names.push_back(item.first);
  return names;
}

}  // namespace

void Session::see(const std::string& what, const at::Tensor& value) { seen_[what] = value.detach().clone(); }

void Session::see_loss(const std::string& when, const at::Tensor& loss) {
  see(when + ": loss", at::scalar_tensor(mean(loss.item<double>()), at::kDouble));
}

Tensors run_plain(const Scenario& scenario) {
  at::set_num_threads(1);
  PlainSession session(scenario);
  scenario.script(session);
  return std::move(session.seen());
}

Tensors run_sharded(const Scenario& scenario, const Context& context) {
  at::set_num_threads(1);
  ShardedSession session(scenario, context);
  scenario.script(session);
  return std::move(session.seen());
}

Tensors run_sharded(const Scenario& scenario, int world_size) {
  Tensors seen;
  run_ranks(world_size, [&](const Context& context) {
    Tensors of_rank = run_sharded(scenario, context);
    if (context.is_main()) seen = std::move(of_rank);
  });
  return seen;
}

void expect_same_seen(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(names_of(actual), names_of(expected));
  for (const auto& [name, wanted] : expected) {
    const at::Tensor& found = actual.at(name);
    if (!wanted.is_floating_point() || !wanted.isnan().any().item<bool>()) {
      expect_equal(found, wanted, kAbsolute, kRelative, name);
      continue;
    }
    EXPECT_LT(wanted.isnan().to(at::kFloat).mean().item<double>(), 0.5)
        << name << ": hardly anything is left to compare";
    EXPECT_TRUE(found.isfinite().all().item<bool>()) << name;
    expect_equal(found.masked_fill(wanted.isnan(), 0), wanted.nan_to_num(0), kAbsolute, kRelative, name);
  }
}

void expect_equals_reference(const Scenario& scenario, std::initializer_list<int> world_sizes) {
  const Tensors expected = run_plain(scenario);
  for (const int world_size : world_sizes) {
    SCOPED_TRACE("world size " + std::to_string(world_size));
    expect_same_seen(run_sharded(scenario, world_size), expected);
  }
}

void expect_equals_reference(const Scenario& scenario, const std::vector<Layout>& layouts) {
  const Tensors expected = run_plain(scenario);
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(name_of(layout));
    Scenario chosen = scenario;
    chosen.strategy = layout.strategy;
    chosen.shard_group = layout.shard_group;
    expect_same_seen(run_sharded(chosen, layout.world_size), expected);
  }
}

std::string name_of(const Layout& layout) {
  constexpr const char* kNames[] = {"Replicate", "ShardOptimizer", "ShardGradients", "FullShard"};
  std::string name = kNames[static_cast<int>(layout.strategy)];
  if (layout.shard_group != 0) name += "InGroupsOf" + std::to_string(layout.shard_group);
  return name + "On" + std::to_string(layout.world_size);
}

void PrintTo(const Layout& layout, std::ostream* out) { *out << name_of(layout); }

std::vector<Layout> all_layouts() {
  std::vector<Layout> layouts;
  for (const Strategy strategy :
       {Strategy::kReplicate, Strategy::kShardOptimizer, Strategy::kShardGradients, Strategy::kFullShard}) {
    for (const int world_size : {1, 2, 3, 4}) layouts.push_back({world_size, strategy});
    if (strategy == Strategy::kReplicate) continue;
    layouts.insert(layouts.end(), {{3, strategy, 1}, {4, strategy, 2}});
  }
  return layouts;
}

std::string gradient_name(const std::string& when, const std::string& parameter) {
  return when + ": gradient of " + parameter;
}
std::string parameter_name(const std::string& when, const std::string& parameter) { return when + ": " + parameter; }

void train(Session& session, const Batch& whole, const std::string& when, const StepOptions& options) {
  const Batch batch = session.part(whole);
  const at::Tensor loss = session.model().loss(batch.input, batch.target);
  loss.backward();
  session.see_loss(when, loss);
  session.see_gradients(when);
  session.step(options);
  session.see_parameters(when);
}

std::size_t resident_parameter_bytes(const torch::nn::Module& module) {
  std::size_t bytes = 0;
  for (const at::Tensor& p : module.parameters()) {
    try {
      if (p.const_data_ptr() != nullptr) bytes += p.nbytes();
    } catch (const c10::Error&) {
      // Sharded: a raw read is refused.
    }
  }
  return bytes;
}

Batch rows(std::int64_t count, std::int64_t input_width, std::int64_t target_width, std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return {at::randn({count, input_width}, generator), at::randn({count, target_width}, generator)};
}

at::Tensor RowModel::loss(const at::Tensor& input, const at::Tensor& target) {
  return at::mse_loss(forward(input), target);
}

}  // namespace fsdp::testing
