#include "sharding/engine_state.h"

#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

// The post-accumulate hook of all parameters of one engine, which removes it when it goes.
class EngineHook final : public GradientHook {
 public:
  explicit EngineHook(EngineState& engine) : engine_(engine) {}
  void on_gradient(const at::Tensor& parameter) override { engine_.on_gradient(parameter); }

 private:
  EngineState& engine_;
};

}  // namespace

EngineState::EngineState(const Context& context, std::shared_ptr<torch::nn::Module> module, std::vector<CutUnit> units,
                         const ShardOptions& options)
    : module_(std::move(module)),
      options_(options),
      core_(context, std::move(units), options.shard_group != 0 ? options.shard_group : context.world_size(),
            options.prefetch, this),
      pager_(core_),
      reducer_(core_, pager_),
      gradients_(core_.model.parameters.size()) {
  try {
    broadcast_parameters();
    core_.model.take_over(std::make_shared<EngineHook>(*this));
  } catch (...) {
    core_.model.release();  // no tensor may keep a storage whose owner is gone
    throw;
  }
}

EngineState::~EngineState() {
  try {
    std::unique_lock lock(core_.mutex);
    pager_.free_all(lock);
  } catch (...) {
    // A peer is gone or an operator still runs; the storages are given up all the same.
  }
  core_.stream.stop();  // its jobs use the pager and the reducer
  core_.model.release();
}

// Each rank takes its shards from what rank 0 packed into its first slot.
void EngineState::broadcast_parameters() {
  constexpr int kSlot = 0;
  Communicator& communicator = core_.communicator();
  for (const UnitLayout& unit : core_.model.units) {
    if (context().is_main()) {
      for (const int index : unit.groups) {
        const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
        core_.model.pack(group, core_.slots.data(kSlot) + group.slot_offset);
      }
    }
    communicator.barrier();
    for (const int index : unit.groups) {
      const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(index)];
      const std::size_t share = static_cast<std::size_t>(core_.mesh.share()) * group.shard_bytes();
      communicator.read(core_.slots.segment(), /*rank=*/0, core_.slots.location(kSlot) + group.slot_offset + share,
                        {core_.parameter_shard(group), group.shard_bytes()});
    }
    communicator.barrier();
  }
}

std::vector<int> EngineState::units_of(const OperatorUse& use) const {
  std::vector<int> units;
  for (const PagedStorage* storage : use.storages) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(storage->index())];
    const int unit = core_.model.parameters[static_cast<std::size_t>(group.parameters.front())].unit;
    if (!contains(units, unit)) units.push_back(unit);
  }
  return units;
}

void EngineState::begin_step() {
  if (identity_checked_) return;
  core_.model.check_identity();
  identity_checked_ = true;
}

// NOTE [Writes to parameters]
// An operator that writes a parameter (init, copy_, _foreach_*, max_norm) is a collective: all ranks gather the old
// values, all write their resident copy, then the owners of each element take the new value of the first of them, or,
// where that one has changed nothing, of the lowest rank that has (max_norm scales the rows that a rank looks up,
// whoever owns them). The resident copies are dropped: ranks may have written different values (random initialisation), and the
// shards decide.
void EngineState::acquire(const OperatorUse& use) {
  const std::vector<int> units = units_of(use);
  {
    std::unique_lock lock(core_.mutex);
    begin_step();
    pager_.acquire(lock, units);
  }
  if (!use.writes) return;
  try {
    guarded(use.name, [&] { core_.communicator().barrier(); });
  } catch (...) {
    const std::lock_guard lock(core_.mutex);
    pager_.release(units, /*discard=*/true);
    throw;
  }
}

void EngineState::release(const OperatorUse& use, bool completed) {
  const std::vector<int> units = units_of(use);
  struct Unpin {
    EngineState& engine;
    const std::vector<int>& units;
    bool wrote;
    ~Unpin() {
      const std::lock_guard lock(engine.core_.mutex);
      engine.pager_.release(units, /*discard=*/wrote);
      if (wrote) engine.identity_checked_ = false;  // an out= operator resizes what it writes
    }
  } const unpin{*this, units, use.writes};
  if (use.writes && completed) guarded(use.name, [&] { write_back(use); });
}

void EngineState::write_back(const OperatorUse& use) {
  std::size_t bytes = 0;
  for (const PagedStorage* storage : use.storages) bytes += storage->nbytes();
  // A slot may be private overflow, so what was written is put where all can read it.
  const std::unique_ptr<Segment> written = core_.communicator().allocate(bytes);
  std::size_t offset = 0;
  for (const PagedStorage* storage : use.storages) {
    std::memcpy(written->local().data() + offset, storage->data(), storage->nbytes());
    offset += storage->nbytes();
  }
  core_.communicator().barrier();
  offset = 0;
  for (const PagedStorage* storage : use.storages) {
    merge_written(core_.model.groups[static_cast<std::size_t>(storage->index())], *written, offset);
    offset += storage->nbytes();
  }
  core_.communicator().barrier();
}

void EngineState::merge_written(const FlatGroup& group, const Segment& written, std::size_t offset) {
  const std::size_t share = offset + static_cast<std::size_t>(core_.mesh.share()) * group.shard_bytes();
  std::vector<const std::byte*> copies{written.peer(core_.mesh.rank_of(0, core_.mesh.share())).data() + share};
  for (int rank = 0; rank < context().world_size(); ++rank) copies.push_back(written.peer(rank).data() + share);
  const std::size_t element_bytes = size_of(group.dtype);
  std::byte* shard = core_.parameter_shard(group);
  for (std::size_t at = 0; at < group.shard_bytes(); at += element_bytes) {
    const auto changed = std::find_if(copies.begin(), copies.end(), [&](const std::byte* copy) {
      return std::memcmp(copy + at, shard + at, element_bytes) != 0;
    });
    if (changed != copies.end()) std::memcpy(shard + at, *changed + at, element_bytes);
  }
}

void EngineState::accumulate_gradient(PagedStorage& storage, const at::Tensor& added) {
  const std::lock_guard lock(core_.mutex);
  at::Tensor& delivered = gradients_[static_cast<std::size_t>(storage.index())].delivered;
  delivered = delivered.defined() ? delivered + added : added;  // another thread's, whose hook comes next
}

void EngineState::clear_gradient(PagedStorage& storage) {
  const std::lock_guard lock(core_.mutex);
  gradients_[static_cast<std::size_t>(storage.index())].cleared = true;
}

std::string EngineState::parameter_name(const PagedStorage& storage, const at::Tensor& tensor) const {
  return core_.model.parameter_name(storage, tensor);
}

void EngineState::rethrow_to_all(std::string_view operation) {
  const auto in_context = [&](std::string_view text) {
    return fmt::format("{} (rank {}, step {}): {}", operation, context().rank(), core_.step.load(), text);
  };
  try {
    throw;
  } catch (const CommunicationError& error) {
    const std::string text = in_context(error.what());
    core_.communicator().abort(text);
    throw CommunicationError(text, error.rank());
  } catch (const Error& error) {
    if (error.id() == ErrorId::kMemory || error.id() == ErrorId::kDevice)
      core_.communicator().abort(in_context(error.what()));
    throw;
  } catch (const std::exception& error) {
    core_.communicator().abort(in_context(error.what()));
    throw;
  }
}

void EngineState::on_gradient(const at::Tensor& tensor) {
  const ShardedParameter& p = core_.model.parameter_of(tensor);
  const auto index = static_cast<std::size_t>(&p - core_.model.parameters.data());
  at::Tensor& grad = tensor.mutable_grad();
  if (!grad.defined()) return;
  std::unique_lock lock(core_.mutex);
  begin_step();
  core_.model.check_identity(p);  // a conversion reads each parameter before it replaces it, so the step had begun
  GradientSlot& slot = gradients_[index];
  const bool was_placeholder = p.is_placeholder(grad);
  at::Tensor gradient = was_placeholder ? std::exchange(slot.delivered, at::Tensor())
                                        : std::exchange(grad, p.placeholder);
  if (!gradient.defined()) return;
  const auto refuse = [&](std::string_view what, std::string_view remedy) {
    grad.reset();
    throw InvalidArgument(fmt::format("{} of parameter {} is refused; {}", what, p.name, remedy));
  };
  if (at::GradMode::is_enabled())
    refuse("backward(create_graph=true): the gradient",
           "use torch::autograd::grad with create_graph, which keeps the graph and accumulates nothing");
  if (gradient.layout() != at::kStrided)
    refuse("a sparse gradient", "build the torch::nn::Embedding with sparse(false)");
  const bool restarts = slot.taken && (slot.cleared || !was_placeholder);
  slot.taken = true;
  slot.cleared = false;
  reducer_.take(lock, static_cast<int>(index), std::move(gradient), restarts);
}

Optimizer EngineState::make_optimizer(OptimizerOptions options) {
  if (optimizer_ != nullptr)
    throw InvalidArgument("Engine::optimizer: expected one call per engine, got a second; keep the first Optimizer");
  optimizer_ = std::make_unique<ShardedOptimizer>(core_, std::move(options));
  return Optimizer(*this);
}

ShardedOptimizer& EngineState::optimizer() {
  if (optimizer_ == nullptr) throw InvalidArgument("this engine has no optimizer yet; call Engine::optimizer first");
  return *optimizer_;
}

std::vector<bool> EngineState::used_here() const {
  std::vector<bool> used(gradients_.size());
  for (std::size_t i = 0; i < used.size(); ++i) {
    const ShardedParameter& p = core_.model.parameters[i];
    used[i] = gradients_[i].taken && !gradients_[i].cleared && p.is_placeholder(p.tensor.grad());
  }
  return used;
}

void EngineState::settle(std::unique_lock<std::mutex>& lock, std::string_view operation) {
  reducer_.settle(lock, operation, used_here());
}

StepResult EngineState::step(const StepOptions& options) {
  if (options.max_grad_norm && !(*options.max_grad_norm > 0)) {
    throw InvalidArgument(
        fmt::format("Optimizer::step: expected max_grad_norm above 0, got {}", *options.max_grad_norm));
  }
  ShardedOptimizer& sharded = optimizer();
  core_.model.check_identity();
  return guarded("Optimizer::step", [&] {
    std::unique_lock lock(core_.mutex);
    pager_.free_all(lock);
    settle(lock, "Optimizer::step");
    lock.unlock();
    const ShardedOptimizer::Norm norm = sharded.gradient_norm(reducer_.used());
    StepResult result{.grad_norm = norm.value};
    if (norm.first_bad >= 0) {
      result.first_bad_parameter = core_.model.parameters[static_cast<std::size_t>(norm.first_bad)].name;
      if (options.on_non_finite == OnNonFinite::kFail) {
        throw Error(
            ErrorId::kNonFinite,
            fmt::format(
                "step {}: the gradient of parameter {} is not finite on some rank; nothing was updated; lower the "
                "learning rate, "
                "look at this step's batch, or skip such steps with StepOptions{{.on_non_finite = OnNonFinite::kSkip}}",
                core_.step.load(), result.first_bad_parameter));
      }
      result.skipped = true;
    } else {
      // As torch::nn::utils::clip_grad_norm_: never above 1, and a zero norm divides by nothing.
      const double scale = options.max_grad_norm ? std::min(1.0, *options.max_grad_norm / (norm.value + 1e-6)) : 1.0;
      sharded.update(reducer_.used(), scale);
    }
    lock.lock();
    end_step(/*updated=*/!result.skipped);
    lock.unlock();
    core_.communicator().barrier();  // no rank gathers before all have stepped
    return result;
  });
}

void EngineState::zero_grad() {
  guarded("Optimizer::zero_grad", [&] {
    std::unique_lock lock(core_.mutex);
    settle(lock, "Optimizer::zero_grad");
    drop_gradients();
  });
}

void EngineState::end_step(bool updated) {
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    // A graph kept over the step saved the old values; its backward must throw, as after torch::optim's in-place
    // update.
    if (updated && reducer_.used()[i]) bump_version(core_.model.parameters[i].tensor);
  }
  drop_gradients();
  core_.timeline.finish_step();
  identity_checked_ = false;
  if (updated) ++core_.step;
}

void EngineState::drop_gradients() {
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].taken) core_.model.parameters[i].tensor.mutable_grad().reset();
    gradients_[i] = {};
  }
  reducer_.forget();
}

}  // namespace fsdp
