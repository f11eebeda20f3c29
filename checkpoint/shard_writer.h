// The files that one rank writes into a step's directory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <fsdp/checkpoint.h>

#include "checkpoint/file_system.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reshard_plan.h"

namespace fsdp {

struct PlannedBox {
  std::size_t view;  // index into the rank's views
  Box box;
};

// Which boxes go to which file of a kind: the main box of every view to files[0], its crumbs to files[1], files[2],
// ..., since readers of this layout expect at most one box per name and file.
struct ShardPlan {
  std::vector<std::vector<PlannedBox>> model, optim;
};

// Throws CheckpointError for views that cannot be saved (check_views).
ShardPlan plan_shards(std::span<const ShardView> views);

// What the ranks have agreed on for one save.
struct SaveTarget {
  std::filesystem::path directory;  // step-000120.tmp-<save id>, with model/, optim/ and rank/ in it
  std::string save_id;
  int rank = 0, world_size = 1;
  std::size_t model_files = 1, optim_files = 1;  // K of the names shard-...-of-K: the most that any rank has
};

// "model/shard-00002-model-00001-of-00003.safetensors": rank 1, file 0, K = 3.
std::string shard_file_name(ShardKind kind, int rank, std::size_t file, std::size_t files);
// "rank/rng-00001-of-00004.safetensors"
std::string rank_file_name(const std::string& key, int rank, int world_size);

// Writes and fsyncs this rank's files and their directories. Files without a tensor are not written. Returns the part
// of the manifest that describes them. Throws CheckpointError.
Manifest write_shards(FileSystem& system, const SaveTarget& target, const CheckpointContent& content,
                      const ShardPlan& plan);

}  // namespace fsdp
