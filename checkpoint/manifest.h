// manifest.json: what a checkpoint holds and where every byte of it lies. docs/checkpoint_format.md shows one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <fsdp/dtype.h>
#include <fsdp/shard_view.h>

#include "checkpoint/reshard_plan.h"

namespace fsdp {

inline constexpr std::uint64_t kManifestVersion = 1;
inline constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 30;

struct ManifestTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  ShardKind kind = ShardKind::kParameter;
  bool operator==(const ManifestTensor&) const = default;
};

struct ManifestFile {
  std::string name;  // "model/shard-00001-model-00001-of-00003.safetensors"
  std::uint64_t bytes = 0;
  std::uint64_t head_bytes = 0;  // up to the first tensor
  std::uint64_t head_xxh3_64 = 0;
  std::string xxh3_128;  // of the whole file
  bool operator==(const ManifestFile&) const = default;
};

// One box of one tensor: row-major at bytes [begin, end) of a file.
struct ManifestExtent {
  std::size_t file = 0, tensor = 0;  // indices into Manifest::files and ::tensors
  Box box;
  std::uint64_t begin = 0, end = 0;
  std::uint64_t xxh3_64 = 0;
  bool operator==(const ManifestExtent&) const = default;
};

struct Manifest {
  std::string save_id;  // 16 hex digits
  std::int64_t step = 0;
  int world_size = 1;
  std::string library_version;
  std::vector<ManifestTensor> tensors;
  std::map<std::string, std::string> tied;  // second name -> the name in tensors
  std::vector<ManifestFile> files;
  std::vector<ManifestExtent> extents;
  std::map<std::string, std::int64_t> scalars;
  bool operator==(const Manifest&) const = default;
};

// "model", "optim": the directory of a kind, also the prefix of its files. Throws InvalidArgument for a kind that is
// not saved.
std::string_view directory_of(ShardKind kind);

// Whether `name` is model/, optim/ or rank/ and a plain file name: a path that stays below the step's directory.
bool is_file_name(std::string_view name);

// One object per line; the last line holds the checksum of all before it.
std::string to_json(const Manifest& manifest);

// Reads text that may be damaged or hostile. Throws CheckpointError with the reason alone; the caller adds the file.
// Names and references are sound after it; whether the extents fill the tensors, check_coverage says.
Manifest parse_manifest(std::string_view text);

// Joins what the ranks wrote; the head (step, ties, ...) is the first part's. Throws CheckpointError where two parts
// describe a tensor differently.
Manifest merge(std::vector<Manifest> parts);

// Throws CheckpointError unless the extents of every tensor are disjoint and fill it.
void check_coverage(const Manifest& manifest);

}  // namespace fsdp
