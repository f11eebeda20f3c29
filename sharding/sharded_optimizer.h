// One optimizer over this rank's shares: what every kind has in common, and the one pass of a step.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <fsdp/optimizer.h>
#include <fsdp/shard_view.h>
#include <fsdp/torch_optimizer.h>

#include "sharding/engine_core.h"
#include "sharding/weight_average.h"

namespace fsdp {

using OptimizerOptions = std::variant<AdamW, Adam, SGD, Muon, TorchOptimizer>;

struct StepSettings {
  GradientUse gradient{};
  double lr_factor = 1;
};

class ShardedOptimizer {
 public:
  virtual ~ShardedOptimizer() = default;

  // Updates the shares of those of the parameters that are used, and the average of all of them where there is one.
  // Collective but for AdamW, Adam and SGD, whose parameters may come unit by unit, on any thread.
  void step(std::span<const int> parameters, const std::vector<bool>& used, const StepSettings& settings,
            WeightAverage* average);

  // Shows each number that checkpoints hold beside the state, as "AdamW.lr", and takes what the visitor makes of it.
  // Throws InvalidArgument for one out of range.
  using SettingVisitor = std::function<void(const std::string& name, double& value)>;
  virtual void visit_settings(const SettingVisitor& visit) = 0;

  // All that an update depends on beside the gradients, a line each: ranks whose lines differ would update differently.
  std::vector<std::string> description();
  // Collective, once, where all ranks have the same description: takes what they share.
  virtual void allocate() {}

  virtual void set_lr(double lr) = 0;
  virtual double lr() const = 0;
  virtual std::size_t state_bytes() const = 0;            // on this rank
  virtual std::size_t unsharded_state_bytes() const = 0;  // of whole tensors
  // State as checkpoints hold it. Throws InvalidArgument where it cannot be saved.
  virtual void append_views(std::vector<ShardView>& views) const = 0;
  // Updates made of each parameter, for bias correction and checkpoints.
  virtual std::int64_t steps_of(std::size_t parameter) const = 0;
  virtual void set_steps_of(std::size_t parameter, std::int64_t steps) = 0;

 protected:
  explicit ShardedOptimizer(EngineCore& core) : core_(core) {}

  // The part of description() that visit_settings does not show.
  virtual void describe_rest(std::vector<std::string>& lines) const = 0;

  // Before the first update_run of a step.
  virtual void prepare(std::span<const int> parameters, const std::vector<bool>& used,
                       const StepSettings& settings) = 0;
  // Elements [begin, begin + numel) of this rank's piece of a used parameter; the runs of a piece come in order.
  virtual void update_run(std::size_t parameter, std::int64_t begin, std::int64_t numel) = 0;

  EngineCore& core_;
};

// Throws InvalidArgument for values out of range, naming field and value.
std::unique_ptr<ShardedOptimizer> make_sharded_optimizer(EngineCore& core, OptimizerOptions options);

// Throws InvalidArgument unless `holds`.
void require_option(bool holds, std::string_view field, double found, std::string_view expected);
bool is_non_negative(double value);

// This rank's part of a tensor beside a parameter: name "<prefix><parameter>", elements as the parameter's own piece.
ShardView view_of_piece(const EngineCore& core, const ShardedParameter& p, ShardKind kind, DType dtype,
                        std::string prefix, std::byte* data);

}  // namespace fsdp
