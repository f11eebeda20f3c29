// A user's training loop, written once and run twice: plain LibTorch in one process on whole batches (the reference),
// and sharded, each rank on its part. Whatever the loop looks at is recorded by name, and the two records must agree.
#pragma once

#include <filesystem>
#include <functional>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <string>
#include <variant>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <fsdp/fsdp.h>

#include "tests/support/parity.h"

namespace fsdp::testing {

// The loop's side of one run.
class Session {
 public:
  explicit Session(std::shared_ptr<LossModel> model) : model_(std::move(model)) {}
  virtual ~Session() = default;

  LossModel& model() { return *model_; }
  template <class Model>
  Model& model_as() {
    return dynamic_cast<Model&>(*model_);
  }
  // Both are nullptr in the reference.
  virtual Engine* engine() = 0;
  virtual const Context* context() const = 0;

  // The rows of a whole batch that this run trains on; the mean over ranks.
  virtual Batch part(const Batch& whole) const = 0;
  virtual double mean(double value) const = 0;
  // Returns the gradients' norm before clipping; 0 in the reference where `options` do not clip.
  virtual double step(const StepOptions& options = {}) = 0;
  virtual void zero_grad() = 0;

  // Go on with a new model and engine whose values come from what the old ones saved. The reference just goes on. The
  // consolidated file holds no optimizer state.
  virtual void save_and_restart(const std::filesystem::path& dir) = 0;
  virtual void consolidate_and_restart(const std::filesystem::path& file) = 0;

  void see(const std::string& what, const at::Tensor& value);
  void see_loss(const std::string& when, const at::Tensor& loss);
  // Those of parameters that have one, averaged over ranks.
  virtual void see_gradients(const std::string& when) = 0;
  virtual void see_parameters(const std::string& when) = 0;
  Tensors& seen() { return seen_; }

 protected:
  std::shared_ptr<LossModel> model_;

 private:
  Tensors seen_;
};

struct Scenario {
  std::function<std::shared_ptr<LossModel>()> make_model{};  // the same values each time it is called
  std::function<void(Session&)> script{};
  Units units{};
  std::variant<SGD, AdamW> optimizer = SGD{.lr = 0.1};
  int prefetch = 1;
  bool shard_in_inference_mode = false;
  Strategy strategy = Strategy::kFullShard;
  int shard_group = 0;
};

// How many ranks there are, and what each of them holds.
struct Layout {
  int world_size = 1;
  Strategy strategy = Strategy::kFullShard;
  int shard_group = 0;
};
std::string name_of(const Layout& layout);
void PrintTo(const Layout& layout, std::ostream* out);
// Each strategy at one to four ranks, and each that shards in replicas of one rank and of two.
std::vector<Layout> all_layouts();

Tensors run_plain(const Scenario& scenario);
Tensors run_sharded(const Scenario& scenario, int world_size);
Tensors run_sharded(const Scenario& scenario, const Context& context);

// The same names with equal values: to 1e-6 absolute and 1e-5 relative.
void expect_same_seen(const Tensors& actual, const Tensors& expected);
void expect_equals_reference(const Scenario& scenario, std::initializer_list<int> world_sizes = {1, 2, 3});
// With the layout's strategy instead of the scenario's own.
void expect_equals_reference(const Scenario& scenario, const std::vector<Layout>& layouts);

// Names under which a session records.
std::string gradient_name(const std::string& when, const std::string& parameter);
std::string parameter_name(const std::string& when, const std::string& parameter);

// Forward, backward and step on one batch, all of it seen.
void train(Session& session, const Batch& whole, const std::string& when, const StepOptions& options = {});

// Bytes of parameters that a raw pointer reaches at this moment. Not while a gather may be under way.
std::size_t resident_parameter_bytes(const torch::nn::Module& module);

// Rows of normal noise.
Batch rows(std::int64_t count, std::int64_t input_width, std::int64_t target_width, std::uint64_t seed);

// Rows to rows, trained to the mean square of the difference.
class RowModel : public LossModel {
 public:
  using LossModel::LossModel;
  at::Tensor loss(const at::Tensor& input, const at::Tensor& target) override;
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};

template <class Model, class... Arguments>
std::function<std::shared_ptr<LossModel>()> seeded(Arguments... arguments) {
  return [=]() -> std::shared_ptr<LossModel> {
    at::manual_seed(11);
    return std::make_shared<Model>(arguments...);
  };
}

}  // namespace fsdp::testing
