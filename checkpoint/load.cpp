#include "checkpoint/load.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "checkpoint/agreement.h"
#include "checkpoint/box_copy.h"
#include "checkpoint/manifest.h"
#include "checkpoint/shard_writer.h"
#include "checkpoint/step_directory.h"
#include "checkpoint/tensor_match.h"
#include "checkpoint/xxh3.h"

namespace fsdp {
namespace {

constexpr const char* kDamageRemedy =
    "restore the file from a copy, or move this step's directory away to load the step before it";

// The part of one extent that one view wants.
struct PlannedRead {
  std::size_t extent;
  const ShardView* view;
  std::vector<Box> regions;
};

std::vector<PlannedRead> plan_reads(const Manifest& manifest, std::span<const ShardView> views,
                                    std::span<const std::size_t> tensors) {
  std::vector<std::vector<std::size_t>> extents_of(manifest.tensors.size());
  for (std::size_t i = 0; i < manifest.extents.size(); ++i) extents_of[manifest.extents[i].tensor].push_back(i);
  std::vector<PlannedRead> reads;
  for (std::size_t i = 0; i < views.size(); ++i) {
    const std::vector<Box> wanted = boxes_of({views[i].shape, views[i].strides, views[i].begin, views[i].end});
    for (const std::size_t extent : extents_of[tensors[i]]) {
      std::vector<Box> regions;
      for (const Box& box : wanted) {
        if (auto region = intersect(manifest.extents[extent].box, box)) regions.push_back(std::move(*region));
      }
      if (!regions.empty()) reads.push_back({extent, &views[i], std::move(regions)});
    }
  }
  // In the order of the disk: each file is opened once and read forwards.
  std::stable_sort(reads.begin(), reads.end(), [&](const PlannedRead& a, const PlannedRead& b) {
    const ManifestExtent &x = manifest.extents[a.extent], &y = manifest.extents[b.extent];
    return x.file != y.file ? x.file < y.file : x.begin < y.begin;
  });
  return reads;
}

// The files of one step, each opened only after its size and head have been found to be those of the manifest.
class StepReader {
 public:
  StepReader(FileSystem& system, const std::filesystem::path& step_dir, const Manifest& manifest)
      : system_(system), step_dir_(step_dir), manifest_(manifest) {}

  // All files are there with the right sizes: found before any view is changed.
  void check_files() const {
    for (const ManifestFile& file : manifest_.files) open_sized(file);
  }

  void read(std::span<const PlannedRead> reads) {
    for (const PlannedRead& planned : reads) {
      const ManifestExtent& extent = manifest_.extents[planned.extent];
      open(extent.file);
      buffer_.resize(extent.end - extent.begin);
      open_->read(extent.begin, buffer_);
      if (xxh3_64(buffer_) != extent.xxh3_64) {
        throw CheckpointError(fmt::format("{}: tensor {}, bytes [{}, {}) do not match their checksum: {}",
                                          (step_dir_ / manifest_.files[extent.file].name).string(),
                                          manifest_.tensors[extent.tensor].name, extent.begin, extent.end,
                                          kDamageRemedy));
      }
      for (const Box& region : planned.regions) unpack_region(region, extent.box, buffer_, *planned.view);
    }
  }

  // Key -> bytes of the rank's own files.
  std::map<std::string, std::vector<std::byte>> read_rank_state(int rank, int world_size) {
    std::map<std::string, std::vector<std::byte>> states;
    const std::string suffix = rank_file_name("", rank, world_size).substr(std::string_view("rank/").size());
    for (std::size_t i = 0; i < manifest_.files.size(); ++i) {
      const std::string& name = manifest_.files[i].name;
      if (!name.starts_with("rank/") || !name.ends_with(suffix)) continue;
      const std::string key = name.substr(5, name.size() - 5 - suffix.size());
      states[key] = read_whole_tensor(i, key);
    }
    return states;
  }

 private:
  File open_sized(const ManifestFile& file) const {
    // From the directory above: the step itself, too, must not be a link.
    File opened = File::open_beneath(system_, step_dir_.parent_path(), step_dir_.filename() / file.name);
    if (opened.bytes() != file.bytes) {
      throw CheckpointError(fmt::format("{}: expected {} bytes, got {}: {}", opened.path().string(), file.bytes,
                                        opened.bytes(), kDamageRemedy));
    }
    return opened;
  }

  void open(std::size_t index) {
    if (open_ && index_ == index) return;
    const ManifestFile& file = manifest_.files[index];
    open_.emplace(open_sized(file));
    index_ = index;
    std::vector<std::byte> head(file.head_bytes);
    open_->read(0, head);
    if (xxh3_64(head) != file.head_xxh3_64) {
      throw CheckpointError(fmt::format("{}: header, bytes [0, {}) do not match their checksum: {}",
                                        open_->path().string(), file.head_bytes, kDamageRemedy));
    }
  }

  std::vector<std::byte> read_whole_tensor(std::size_t index, const std::string& key) {
    open(index);
    const ManifestFile& file = manifest_.files[index];
    std::vector<std::byte> bytes(file.bytes);
    open_->read(0, bytes);
    Xxh3Stream whole;
    whole.update(bytes);
    if (whole.hex() != file.xxh3_128) {
      throw CheckpointError(fmt::format("{}: tensor {}, bytes [0, {}) do not match their checksum: {}",
                                        open_->path().string(), key, file.bytes, kDamageRemedy));
    }
    bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(file.head_bytes));
    return bytes;
  }

  FileSystem& system_;
  const std::filesystem::path& step_dir_;
  const Manifest& manifest_;
  std::optional<File> open_;
  std::size_t index_ = 0;  // of the open file
  std::vector<std::byte> buffer_;
};

// "step-000120\n" and the manifest's text; "" where there is no step.
std::string find_step(FileSystem& system, const std::filesystem::path& dir) {
  const auto step = newest_step(system, dir);
  if (!step) return "";
  const File file = File::open_beneath(system, dir, std::filesystem::path(step_name(*step)) / kManifestName);
  return step_name(*step) + "\n" + file.read_text(kMaxManifestBytes);
}

Manifest read_manifest(std::string_view text, const std::filesystem::path& step_dir) {
  try {
    Manifest manifest = parse_manifest(text);
    if (step_name(manifest.step) != step_dir.filename()) {
      throw CheckpointError(fmt::format("describes step {}, not that of its directory", manifest.step));
    }
    check_coverage(manifest);
    return manifest;
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format("{}: {}: {}", (step_dir / kManifestName).string(), error.what(), kDamageRemedy));
  }
}

}  // namespace

std::optional<LoadedCheckpoint> load_checkpoint(Communicator& communicator, FileSystem& system,
                                                const std::filesystem::path& dir, std::span<const ShardView> views) {
  // Only rank 0 looks: on a shared file system the ranks need not see the same names at the same time.
  const std::string found = on_rank_zero(communicator, "load from " + dir.string(),
                                         [&] { return find_step(system, dir); });
  if (found.empty()) return std::nullopt;
  const std::size_t line_end = found.find('\n');
  const std::filesystem::path step_dir = dir / found.substr(0, line_end);
  const std::string what = "load of " + step_dir.string();

  Manifest manifest;
  std::vector<PlannedRead> reads;
  on_all_ranks(communicator, what, [&] {
    check_views(views);
    manifest = read_manifest(std::string_view(found).substr(line_end + 1), step_dir);
    Aliases aliases;
    aliases.instead.insert(manifest.tied.begin(), manifest.tied.end());
    reads = plan_reads(manifest, views, match_views(views, manifest.tensors, aliases));
    if (communicator.rank() == 0) StepReader(system, step_dir, manifest).check_files();
    return std::string();
  });

  LoadedCheckpoint loaded{.step = manifest.step,
                          .path = step_dir,
                          .saved_world_size = manifest.world_size,
                          .scalars = manifest.scalars,
                          .rank_state = {}};
  on_all_ranks(communicator, what, [&] {
    StepReader reader(system, step_dir, manifest);
    reader.read(reads);
    if (manifest.world_size == communicator.world_size()) {
      loaded.rank_state = reader.read_rank_state(communicator.rank(), communicator.world_size());
    }
    return std::string();
  });
  return loaded;
}

std::optional<LoadedCheckpoint> load_checkpoint(Communicator& communicator, const std::filesystem::path& dir,
                                                std::span<const ShardView> views) {
  FileSystem system;
  return load_checkpoint(communicator, system, dir.empty() ? "." : dir, views);
}

}  // namespace fsdp
