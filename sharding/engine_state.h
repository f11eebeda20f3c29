// One engine: paging, reductions and the optimizer over one core.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/SmallVector.h>
#include <torch/nn/module.h>

#include <fsdp/engine.h>

#include "memory/torch_storage.h"
#include "sharding/engine_core.h"
#include "sharding/gradient_norm.h"
#include "sharding/gradient_reducer.h"
#include "sharding/pager.h"
#include "sharding/sharded_optimizer.h"
#include "sharding/weight_average.h"

namespace fsdp {

class EngineState final : public StorageOwner {
 public:
  // Collective. `units` are the module's, cut by the options.
  EngineState(const Context& context, std::shared_ptr<torch::nn::Module> module, std::vector<CutUnit> units,
              const std::vector<UnitPolicy>& policies, const ShardOptions& options);
  ~EngineState() override;

  // StorageOwner: what the dispatcher's fallback asks for.
  void acquire(const OperatorUse& use) override;
  void release(const OperatorUse& use, bool completed) override;
  void accumulate_gradient(PagedStorage& storage, const at::Tensor& added) override;
  void clear_gradient(PagedStorage& storage) override;
  std::string parameter_name(const PagedStorage& storage, const at::Tensor& tensor) const override;

  void on_gradient(const at::Tensor& parameter);

  Optimizer make_optimizer(OptimizerOptions options);
  StepResult step(const StepOptions& options);
  void zero_grad();
  ShardedOptimizer& optimizer();
  void set_lr(double lr);
  void set_schedule(Schedule schedule);
  at::Tensor weigh(const at::Tensor& mean_loss, double samples);
  void attempt(const std::function<void()>& body);

  at::Tensor cast_input(const at::Tensor& input) const;
  std::vector<at::Tensor> cast_outputs(std::vector<at::Tensor> outputs);

  void keep_ema(const Ema& options);
  void begin_averaged();
  void end_averaged();

  void save(const std::filesystem::path& dir, const SaveOptions& options);
  std::optional<std::int64_t> resume(const std::filesystem::path& dir, const ResumeOptions& options);
  void consolidate(const std::filesystem::path& file, const SaveOptions& options);
  void load_consolidated(const std::filesystem::path& file, const LoadOptions& options);

  void begin_no_sync();
  void end_no_sync() { reducer_.end_no_sync(); }
  void begin_keeping();
  void end_keeping();
  void begin_summon(const SummonOptions& options);
  void end_summon(const SummonOptions& options);

  std::vector<ShardView> shard_views() const;
  std::vector<ShardView> gradient_views();
  MemoryReport memory();
  Plan plan();
  std::int64_t steps() const { return core_.step.load(); }

 private:
  // What became of a trainable parameter's .grad since the last step.
  struct GradientSlot {
    bool taken = false;    // a placeholder was left
    bool cleared = false;  // and zeroed in place by the user
    at::Tensor delivered;  // autograd added this to the placeholder; the hook comes next
  };

  using UnitList = c10::SmallVector<int, 4>;  // an operator rarely touches more
  UnitList units_of(const OperatorUse& use) const;
  void begin_step();
  std::vector<int> take_restarts(const ShardedParameter& p);
  void check_readable(std::string_view operation, std::span<const int> units) const;
  void save_shares(const OperatorUse& use);
  void restore_shares(const OperatorUse& use);
  void write_back(const OperatorUse& use);
  void merge_written(const FlatGroup& group, const Segment& written, std::size_t offset, const std::byte* before);
  void broadcast_parameters();
  void broadcast_buffers();
  void check_nothing_was_added() const;
  // What a checkpoint holds, with frozen parameters or without.
  std::vector<ShardView> checkpoint_views(bool trainable_only) const;
  std::map<std::string, std::string> checkpoint_ties(bool trainable_only) const;
  OperatorUse use_of_all(std::vector<PagedStorage*>& storages, bool writes) const;
  GradientReducer::Usage usage_here() const;
  void settle(std::unique_lock<std::mutex>& lock, std::string_view operation, const StepTerms& terms = {});
  // Before a collective that does not settle: ranks that call something else, or give the step up, are found here.
  void meet(std::string_view operation);
  void drop_if_failed(const std::function<void()>& body);
  void meet_again_if_failed(const std::function<void()>& end_scope);
  // What an engine that updates in backward cannot do at all, and not between that backward and the step.
  void refuse_update_in_backward(std::string_view operation, std::string_view reason) const;
  void refuse_with_update_in_backward(const StepOptions& options) const;
  void refuse_half_updated(std::string_view operation);
  void update_unit(int unit, bool all_used);
  void update(const StepSettings& step_settings);
  StepSettings settings() const;
  StepTerms terms_of(const StepOptions& options) const;
  [[noreturn]] void fail_step(const std::string& reason);
  // Throws InvalidArgument within a scope that shows other values than the shards'.
  void refuse_within_scopes(std::string_view operation) const;
  void swap_averages(std::string_view operation);
  void refuse_non_finite(const StepOptions& options, int first_bad, StepResult& result) const;
  void end_step(bool updated);
  void report_progress() const { core_.communicator().report_progress({core_.step + 1, core_.saved_step}); }
  void drop_gradients();
  // Runs a collective part; a failure of one rank ends the others' waits too.
  template <class Body>
  auto guarded(std::string_view operation, const Body& body) -> decltype(body()) {
    try {
      return body();
    } catch (...) {
      rethrow_to_all(operation);
    }
  }
  // A refusal (InvalidArgument, CheckpointError, kNonFinite) comes on every rank by itself. Anything else is this
  // rank's own, so the group is aborted.
  [[noreturn]] void rethrow_to_all(std::string_view operation);
  const Context& context() const { return core_.context; }
  void fetch(const ShardedParameter& p, std::span<std::byte> bytes) const;
  void refresh_parameters();
  // Before shards change from outside: nothing resident, nothing accumulated.
  void drop_resident(std::string_view operation);

  std::shared_ptr<torch::nn::Module> module_;
  ShardOptions options_;
  EngineCore core_;
  Pager pager_;
  GradientReducer reducer_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  std::unique_ptr<WeightAverage> average_;
  Schedule schedule_;
  std::vector<bool> updated_;            // in backward, by parameter; on the engine's thread
  SampleCount samples_;                  // since the last step
  std::vector<GradientSlot> gradients_;  // by parameter
  std::map<const PagedStorage*, std::vector<std::byte>> shares_before_write_;
  bool identity_checked_ = false;  // since the last step
  bool output_cast_ = false;       // by Engine::forward, since the last step
  bool summoned_ = false, averaged_ = false;
  bool shows_gradients_ = false;  // within Engine::summon: .grad holds them
};

}  // namespace fsdp
