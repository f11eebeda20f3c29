#include "sharding/engine_state.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <fmt/format.h>

#include <fsdp/error.h>

#include "sharding/deferred_storage.h"
#include "sharding/model_agreement.h"

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
                         const std::vector<UnitPolicy>& policies, const ShardOptions& options)
    : module_(std::move(module)),
      options_(options),
      core_(context, std::move(units), policies, options, this),
      pager_(core_),
      reducer_(core_, pager_),
      gradients_(core_.model.parameters.size()) {
  try {
    broadcast_parameters();
    broadcast_buffers();
    core_.model.take_over(std::make_shared<EngineHook>(*this));
    report_progress();
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
  core_.mailbox.set_gone();
  core_.model.release();
}

// Each rank takes its pieces of rank 0's tensors, one tensor at a time; a deferred one it fills by itself.
void EngineState::broadcast_parameters() {
  Communicator& communicator = core_.communicator();
  std::size_t largest = 0;
  for (const ShardedParameter& p : core_.model.parameters) {
    if (DeferredStorage::of(p.tensor) == nullptr) largest = std::max(largest, p.tensor.nbytes());
  }
  const std::unique_ptr<Segment> whole = communicator.allocate(largest);
  for (const ShardedParameter& p : core_.model.parameters) {
    const FlatGroup& group = core_.model.group_of(p);
    const DType dtype = group.master_dtype;
    std::byte* piece = core_.master_shard(group) + bytes_of(p.piece.shard_offset, dtype);
    if (const DeferredStorage* deferred = DeferredStorage::of(p.tensor)) {
      deferred->fill(p.piece.begin, p.piece.numel(), piece);
      continue;
    }
    // Dense and not overlapping, so the elements lie side by side whatever the strides.
    if (context().is_main() && p.tensor.numel() > 0)
      std::memcpy(whole->local().data(), p.tensor.const_data_ptr(), p.tensor.nbytes());
    communicator.barrier();
    communicator.read(*whole, /*rank=*/0, bytes_of(p.piece.begin, dtype), {piece, bytes_of(p.piece.numel(), dtype)});
    communicator.barrier();
  }
  refresh_parameters();
  communicator.barrier();  // no rank gathers from one that has not filled its shares
}

// Running statistics and the like: whole on every rank, and rank 0's at the start.
void EngineState::broadcast_buffers() {
  const at::NoGradGuard no_grad;
  for (auto& item : module_->named_buffers()) {
    at::Tensor& buffer = item.value();
    materialize_in_place(buffer);
    if (!buffer.defined() || buffer.numel() == 0 || buffer.layout() != at::kStrided || !buffer.device().is_cpu())
      continue;
    const at::Tensor values = buffer.contiguous();
    core_.communicator().broadcast({static_cast<std::byte*>(values.mutable_data_ptr()), values.nbytes()}, /*root=*/0);
    if (!values.is_same(buffer)) buffer.copy_(values);
  }
}

// Nobody would average its gradient, and no optimizer of the engine would step it.
void EngineState::check_nothing_was_added() const {
  for (const auto& item : module_->named_parameters()) {
    if (!item.value().defined() || core_.model.holds(item.value())) continue;
    throw InvalidArgument(
        fmt::format("parameter {} was registered after fsdp::shard, which knows nothing of it; build "
                    "the whole module first, then shard it",
                    item.key()));
  }
}

EngineState::UnitList EngineState::units_of(const OperatorUse& use) const {
  UnitList units;
  for (const PagedStorage* storage : use.storages) {
    const int unit = core_.model.groups[static_cast<std::size_t>(storage->index())].unit;
    if (!contains(units, unit)) units.push_back(unit);
  }
  return units;
}

void EngineState::begin_step() {
  if (identity_checked_) return;
  core_.model.check_identity();
  // Walking the module's names costs more than a check of each step may; a module that is built on late is found early.
  if (std::has_single_bit(static_cast<std::uint64_t>(core_.step)) || core_.step == 0) check_nothing_was_added();
  if (at::autocast::is_autocast_enabled(at::kCPU)) {
    TORCH_WARN_ONCE(
        "libfsdp: autocast holds a 16-bit copy of every weight that it casts until its region ends, on every "
        "rank; ShardOptions::precision computes in 16 bits without");
  }
  identity_checked_ = true;
}

// NOTE [Writes to parameters]

// An operator that writes a parameter (init, copy_, _foreach_*, max_norm) is a collective:
// all ranks gather the old values, all write their resident copy, then the owners of each element take the new value of
// the first of them, or, where that one has changed nothing, of the lowest rank that has (max_norm scales the rows that
// a rank looks up, whoever owns them). The resident copies are dropped: ranks may have written different values (random
// initialisation), and the shards decide. Where a unit keeps its parameters the operator has overwritten this rank's
// own share, too, which is therefore saved before.
void EngineState::acquire(const OperatorUse& use) {
  const UnitList units = units_of(use);
  {
    std::unique_lock lock(core_.mutex);
    begin_step();
    check_readable(use.name, units);
    pager_.acquire(lock, units);
  }
  if (!use.writes) return;
  try {
    guarded(use.name, [&] { meet(use.name); });
    save_shares(use);
  } catch (...) {
    const std::lock_guard lock(core_.mutex);
    pager_.release(units, /*discard=*/true);
    throw;
  }
}

// NOTE [Update in backward]
void EngineState::check_readable(std::string_view operation, std::span<const int> units) const {
  if (!core_.update_in_backward) return;
  for (const int unit : units) {
    if (!reducer_.is_closed(unit)) continue;
    throw InvalidArgument(fmt::format(
        "{} of unit {} between its update in backward (update_in_backward) and the end of the step; call "
        "Optimizer::step before the next forward, and use a parameter only in graphs that reach its gradient",
        operation, core_.unit_name(unit)));
  }
}

void EngineState::release(const OperatorUse& use, bool completed) {
  const UnitList units = units_of(use);
  struct Unpin {
    EngineState& engine;
    std::span<const int> units;
    bool wrote;
    ~Unpin() {
      const std::lock_guard lock(engine.core_.mutex);
      engine.pager_.release(units, /*discard=*/wrote);
      if (wrote) engine.identity_checked_ = false;  // an out= operator resizes what it writes
    }
  } const unpin{*this, units, use.writes};
  if (!use.writes) return;
  if (completed) {
    guarded(use.name, [&] { write_back(use); });
  } else {
    restore_shares(use);
  }
}

void EngineState::save_shares(const OperatorUse& use) {
  for (const PagedStorage* storage : use.storages) {
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(storage->index())];
    const std::byte* share = core_.parameter_shard(group);
    if (core_.model.unit_of(group).policy.keeps_parameters)
      shares_before_write_[storage].assign(share, share + group.shard_bytes());
  }
}

void EngineState::restore_shares(const OperatorUse& use) {
  for (const PagedStorage* storage : use.storages) {
    const auto saved = shares_before_write_.extract(storage);
    if (saved.empty()) continue;
    const FlatGroup& group = core_.model.groups[static_cast<std::size_t>(storage->index())];
    std::copy(saved.mapped().begin(), saved.mapped().end(), core_.parameter_shard(group));
  }
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
    const auto saved = shares_before_write_.extract(storage);
    merge_written(core_.model.groups[static_cast<std::size_t>(storage->index())], *written, offset,
                  saved.empty() ? nullptr : saved.mapped().data());
    offset += storage->nbytes();
  }
  core_.communicator().barrier();
}

// `before` are the values before the write where the share no longer has them, else nullptr.
void EngineState::merge_written(const FlatGroup& group, const Segment& written, std::size_t offset,
                                const std::byte* before) {
  const Mesh& mesh = core_.model.unit_of(group).mesh;
  const std::size_t share = offset + static_cast<std::size_t>(mesh.share()) * group.shard_bytes();
  std::vector<std::vector<std::byte>> copies;
  const auto take_copy_of = [&](int rank) {
    core_.communicator().read(written, rank, share, copies.emplace_back(group.shard_bytes()));
  };
  take_copy_of(mesh.rank_of(0, mesh.share()));
  for (int rank = 0; rank < context().world_size(); ++rank) take_copy_of(rank);
  const std::size_t element_bytes = size_of(group.dtype);
  std::byte* shard = core_.parameter_shard(group);
  if (before == nullptr) before = shard;
  for (std::int64_t i = 0; i < group.layout->shard_numel(); ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * element_bytes;
    const auto changed = std::find_if(copies.begin(), copies.end(), [&](const std::vector<std::byte>& copy) {
      return std::memcmp(copy.data() + at, before + at, element_bytes) != 0;
    });
    if (changed == copies.end()) {
      if (before != shard) std::memcpy(shard + at, before + at, element_bytes);
      continue;
    }
    std::memcpy(shard + at, changed->data() + at, element_bytes);
    if (group.has_master())
      cast_elements(core_.master_shard(group) + bytes_of(i, group.master_dtype), group.master_dtype, shard + at,
                    group.dtype, 1);
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
  const std::vector<int> restarts = slot.taken && (slot.cleared || !was_placeholder) ? take_restarts(p)
                                                                                     : std::vector<int>{};
  if (summoned_) refuse("the gradient of a backward within Engine::summon", "run backward outside of the scope");
  slot.taken = true;
  slot.cleared = false;
  // What autograd adds to a gradient that is there may be the user's own tensor.
  reducer_.take(lock, static_cast<int>(index), std::move(gradient), restarts, /*is_borrowed=*/was_placeholder);
}

// What the user has cleared of the unit of `p`, itself included, and from now on counts as not taken.
std::vector<int> EngineState::take_restarts(const ShardedParameter& p) {
  std::vector<int> restarts;
  for (const int index : core_.unit(p.unit).trainable) {
    const ShardedParameter& other = core_.model.parameters[static_cast<std::size_t>(index)];
    GradientSlot& slot = gradients_[static_cast<std::size_t>(index)];
    const bool cleared = &other == &p || (slot.taken && (slot.cleared || !other.is_placeholder(other.tensor.grad())));
    if (!cleared) continue;
    restarts.push_back(index);
    slot.taken = slot.cleared = false;
    if (&other != &p) other.tensor.mutable_grad().reset();
  }
  return restarts;
}

Optimizer EngineState::make_optimizer(OptimizerOptions options) {
  if (optimizer_ != nullptr)
    throw InvalidArgument("Engine::optimizer: expected one call per engine, got a second; keep the first Optimizer");
  optimizer_ = guarded("Engine::optimizer", [&] {
    std::unique_ptr<ShardedOptimizer> optimizer;
    check_same(core_.communicator(), "Engine::optimizer", "another optimizer", [&] {
      optimizer = make_sharded_optimizer(core_, std::move(options));
      return optimizer->description();
    });
    optimizer->allocate();
    return optimizer;
  });
  if (core_.update_in_backward) {
    updated_.resize(gradients_.size());
    reducer_.update_with([this](int unit, bool all_used) { update_unit(unit, all_used); });
  }
  return Optimizer(*this);
}

ShardedOptimizer& EngineState::optimizer() {
  if (optimizer_ == nullptr) throw InvalidArgument("this engine has no optimizer yet; call Engine::optimizer first");
  return *optimizer_;
}

}  // namespace fsdp
