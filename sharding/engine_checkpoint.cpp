// Save, resume, and the consolidated file: the engine's side of <fsdp/checkpoint.h>.
#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <fsdp/checkpoint.h>
#include <fsdp/error.h>

#include "memory/torch_random.h"
#include "sharding/engine_state.h"
#include "sharding/model_agreement.h"

namespace fsdp {
namespace {

constexpr const char* kRandomState = "rng";
constexpr const char* kSetting = "optimizer_setting.";  // the bits of a double
std::string step_scalar(const std::string& parameter) { return "optimizer_step." + parameter; }

std::vector<std::byte> random_bytes() {
  const at::Tensor state = random_state();
  const auto* bytes = static_cast<const std::byte*>(state.const_data_ptr());
  return {bytes, bytes + state.nbytes()};
}

void set_random_bytes(const std::vector<std::byte>& bytes) {
  const at::Tensor state = at::empty({static_cast<std::int64_t>(bytes.size())}, at::TensorOptions(at::kByte));
  std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  set_random_state(state);
}

// Every rank learns whether the others succeeded; the first failing rank's text is thrown on all.
template <class Body>
void together(Communicator& communicator, const Body& body) {
  constexpr std::size_t kTextBytes = 4096;
  std::vector<std::byte> own(kTextBytes), all(kTextBytes * static_cast<std::size_t>(communicator.world_size()));
  try {
    body();
  } catch (const CommunicationError&) {
    throw;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    std::memcpy(own.data(), text.data(), std::min(text.size(), kTextBytes - 1));
  }
  communicator.all_gather(own, all);
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    const char* text = reinterpret_cast<const char*>(all.data()) + static_cast<std::size_t>(rank) * kTextBytes;
    if (*text != '\0') throw CheckpointError(fmt::format("rank {}: {}", rank, text), rank);
  }
}

}  // namespace

std::vector<ShardView> EngineState::checkpoint_views(bool trainable_only) const {
  std::vector<ShardView> views = shard_views();
  std::set<std::string> frozen;
  for (const ShardedParameter& p : core_.model.parameters) {
    if (trainable_only && p.trainable_index < 0) frozen.insert(p.name);
  }
  std::erase_if(
      views, [&](const ShardView& view) { return view.kind == ShardKind::kParameter && frozen.count(view.name) > 0; });
  return views;
}

std::map<std::string, std::string> EngineState::checkpoint_ties(bool trainable_only) const {
  std::map<std::string, std::string> ties;
  for (const ShardedParameter& p : core_.model.parameters) {
    if (trainable_only && p.trainable_index < 0) continue;
    for (const std::string& name : p.tied_names) ties[name] = p.name;
  }
  return ties;
}

void EngineState::save(const std::filesystem::path& dir, const SaveOptions& options) {
  refuse_within_scopes("Engine::save");
  refuse_half_updated("Engine::save");
  check_nothing_was_added();
  guarded("Engine::save", [&] {
    meet("Engine::save");
    CheckpointContent content;
    content.step = core_.step;
    content.views = checkpoint_views(options.trainable_only);
    for (ShardView& view : content.views) {
      if (view.replica != 0) view.end = view.begin;  // the first replica writes for all
    }
    content.tied = checkpoint_ties(options.trainable_only);
    for (std::size_t i = 0; i < core_.model.parameters.size(); ++i) {
      const ShardedParameter& p = core_.model.parameters[i];
      if (optimizer_ != nullptr && p.trainable_index >= 0)
        content.scalars[step_scalar(p.name)] = optimizer_->steps_of(i);
    }
    if (optimizer_ != nullptr) {
      optimizer_->visit_settings([&](const std::string& name, double value) {
        content.scalars[kSetting + name] = std::bit_cast<std::int64_t>(value);
      });
    }
    content.rank_state[kRandomState] = random_bytes();
    save_checkpoint(core_.communicator(), dir, content);
    core_.saved_step = content.step;
    report_progress();
  });
}

std::optional<std::int64_t> EngineState::resume(const std::filesystem::path& dir, const ResumeOptions& options) {
  return guarded("Engine::resume", [&]() -> std::optional<std::int64_t> {
    const c10::InferenceMode normal_mode(false);
    drop_resident("Engine::resume");
    const std::optional<LoadedCheckpoint> loaded = load_checkpoint(core_.communicator(), dir,
                                                                   checkpoint_views(options.trainable_only));
    if (!loaded) return std::nullopt;
    refresh_parameters();
    core_.step = loaded->step;
    core_.saved_step = loaded->step;
    report_progress();
    for (std::size_t i = 0; i < core_.model.parameters.size(); ++i) {
      const ShardedParameter& p = core_.model.parameters[i];
      if (optimizer_ == nullptr || p.trainable_index < 0) continue;
      const auto steps = loaded->scalars.find(step_scalar(p.name));
      optimizer_->set_steps_of(i, steps != loaded->scalars.end() ? steps->second : 0);
    }
    if (optimizer_ != nullptr && options.optimizer_settings) {
      optimizer_->visit_settings([&](const std::string& name, double& value) {
        const auto saved = loaded->scalars.find(kSetting + name);
        if (saved != loaded->scalars.end()) value = std::bit_cast<double>(saved->second);
      });
    }
    if (optimizer_ != nullptr)
      check_same(core_.communicator(), "Engine::resume", "other optimizer settings",
                 [&] { return optimizer_->description(); });
    if (const auto random = loaded->rank_state.find(kRandomState); random != loaded->rank_state.end())
      set_random_bytes(random->second);
    core_.communicator().barrier();
    return loaded->step;
  });
}

// Puts together one whole parameter from its owners, in row-major order.
void EngineState::fetch(const ShardedParameter& p, std::span<std::byte> bytes) const {
  const FlatGroup& group = core_.model.group_of(p);
  const DType dtype = group.master_dtype;
  at::Tensor in_memory_order;
  std::byte* target = bytes.data();
  if (!p.tensor.is_contiguous()) {
    in_memory_order = zeroed_bytes(bytes.size());
    target = static_cast<std::byte*>(in_memory_order.mutable_data_ptr());
  }
  if (group.has_master()) {
    core_.read_whole(p, *core_.masters, group.master_offset, 0, dtype, target);
  } else {
    core_.read_whole(p, *core_.parameters, group.parameter_offset, group.parameter_stride, dtype, target);
  }
  if (in_memory_order.defined()) {
    const at::Tensor row_major = make_plain_view(target, p.tensor, dtype).contiguous();
    std::memcpy(bytes.data(), row_major.const_data_ptr(), bytes.size());
  }
}

void EngineState::consolidate(const std::filesystem::path& file, const SaveOptions& options) {
  refuse_half_updated("Engine::consolidate");
  check_nothing_was_added();
  guarded("Engine::consolidate", [&] {
    meet("Engine::consolidate");  // and every rank's shards are final
    together(core_.communicator(), [&] {
      if (!context().is_main()) return;
      std::vector<TensorInfo> tensors;
      std::map<std::string, const ShardedParameter*> by_name;
      for (const ShardedParameter& p : core_.model.parameters) {
        if (options.trainable_only && p.trainable_index < 0) continue;
        tensors.push_back({p.name, core_.model.group_of(p).master_dtype, p.sizes});
        by_name[p.name] = &p;
      }
      write_consolidated(
          file, tensors, checkpoint_ties(options.trainable_only),
          [&](const TensorInfo& info, std::span<std::byte> bytes) { fetch(*by_name.at(info.name), bytes); });
    });
  });
}

void EngineState::load_consolidated(const std::filesystem::path& file, const LoadOptions& options) {
  guarded("Engine::load_consolidated", [&] {
    drop_resident("Engine::load_consolidated");
    std::vector<ShardView> views = checkpoint_views(options.trainable_only);
    std::erase_if(views, [](const ShardView& view) { return view.kind != ShardKind::kParameter; });
    together(core_.communicator(), [&] {
      read_consolidated(file, views, checkpoint_ties(options.trainable_only));
      refresh_parameters();
    });
  });
}

void EngineState::refresh_parameters() {
  for (const FlatGroup& group : core_.model.groups) core_.refresh_parameters(group);
}

void EngineState::drop_resident(std::string_view operation) {
  refuse_within_scopes(operation);
  std::unique_lock lock(core_.mutex);
  pager_.free_all(lock);
  settle(lock, operation);
  end_step(/*updated=*/false);
  for (const ShardedParameter& p : core_.model.parameters) bump_version(p.tensor);  // kept graphs saved other values
}

}  // namespace fsdp
