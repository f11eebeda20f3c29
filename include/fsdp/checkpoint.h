// Sharded checkpoints over shard views, torch-free. Engine::save, resume and consolidate are thin calls of these.
//
// dir/step-000120/ appears by one rename and is never written again:
//   manifest.json                                   authority: tensors, files, extents, scalars, own hash, ...
//   model/shard-00001-model-00001-of-00003.safetensors ...   ShardKind::kParameter
//   optim/shard-...                                          ShardKind::kOptimizer
//   rank/rng-00000-of-00004.safetensors                      per-rank state
// docs/checkpoint_format.md has the whole layout.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fsdp/communicator.h>
#include <fsdp/shard_view.h>

namespace fsdp {

// What one save writes. The same step, tied names and scalars on every rank; views and rank_state are the rank's own.
// Every element of every tensor is in the views of exactly one rank.
struct CheckpointContent {
  std::int64_t step = 0;
  std::vector<ShardView> views = {};                 // kParameter and kOptimizer
  std::map<std::string, std::string> tied = {};      // second name -> the name in views, a parameter's
  std::map<std::string, std::int64_t> scalars = {};  // "optimizer_step.<name>", ...
  // "rng", ...: opaque, per rank. A key is part of a file name: letters, digits, '.', '_' and '-'.
  std::map<std::string, std::vector<std::byte>> rank_state = {};
};

// Collective. Writes dir/step-%06d by temporary directory, fsync and one rename. The same step again replaces the
// directory after the new one is complete. A second process that saves to dir meanwhile is refused. Throws
// CheckpointError with the same text on every rank, naming rank, path and errno text; earlier steps are untouched by a
// failure, what it left is removed then or by the next save, and all ranks can go on. Returns the committed directory.
std::filesystem::path save_checkpoint(Communicator& communicator, const std::filesystem::path& dir,
                                      const CheckpointContent& content);

// What load_checkpoint returned beside the bytes it put in the views.
struct LoadedCheckpoint {
  std::int64_t step = 0;
  std::filesystem::path path;
  int saved_world_size = 0;
  std::map<std::string, std::int64_t> scalars;
  std::map<std::string, std::vector<std::byte>> rank_state;  // this rank's, empty where the saved world size differs
};

// Collective. Loads the newest committed step of `dir` (rank 0 decides which) into `views`, at any world size and with
// any dense strides, by ranged reads verified per extent. Every rank passes a view of every tensor, with an empty
// range where it holds nothing. nullopt if dir does not exist or holds no committed step. Nothing is written to a view
// unless the names, shapes and dtypes of all views match the manifest and all files are there. Throws CheckpointError
// on all ranks for a mismatch (missing, unexpected, shape, dtype; nearest names) or damage (file, tensor, byte range).
// Beyond the views at most one extent is in memory.
std::optional<LoadedCheckpoint> load_checkpoint(Communicator& communicator, const std::filesystem::path& dir,
                                                std::span<const ShardView> views);

// One whole tensor of a consolidated file, in row-major order.
struct TensorInfo {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape = {};
};

// Not collective; called on rank 0. Writes one safetensors file (temporary name, fsync, rename; an existing file is
// replaced by the rename). `fetch(info, bytes)` fills one tensor's row-major bytes, and is called once per tensor in
// the file's order: falling dtype size, then name; one tensor is in memory at a time. `metadata` goes to __metadata__
// beside format=pt; a tied tensor stands there as second name -> name. Throws CheckpointError, and what `fetch`
// throws.
void write_consolidated(const std::filesystem::path& file, const std::vector<TensorInfo>& tensors,
                        const std::map<std::string, std::string>& metadata,
                        const std::function<void(const TensorInfo&, std::span<std::byte>)>& fetch);

// Reads a consolidated safetensors file straight into this rank's parts. Not collective: each rank reads what it
// needs. Every view's name must be there (or be tied in __metadata__) with the same shape and dtype, and every tensor
// of the file must be asked for; else CheckpointError and no view is changed. `tied` are the model's own ties, second
// name -> the name in views: a file may hold either name or both.
void read_consolidated(const std::filesystem::path& file, std::span<const ShardView> views,
                       const std::map<std::string, std::string>& tied = {});

}  // namespace fsdp
