#include "checkpoint/shard_writer.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "checkpoint/box_copy.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/strict_json.h"
#include "checkpoint/tensor_match.h"
#include "checkpoint/xxh3.h"

namespace fsdp {
namespace {

// Optimizer state of a 0-d parameter is written as one of shape [1]: several readers of this layout cannot slice a 0-d
// tensor.
Box box_on_disk(ShardKind kind, const Box& box) {
  if (kind == ShardKind::kOptimizer && box.sizes.empty()) return {{0}, {1}};
  return box;
}

// What Python's distributed checkpoint reader needs to put the boxes together.
std::map<std::string, std::string> shard_metadata(const std::vector<SafetensorsTensor>& tensors,
                                                  const std::vector<Box>& boxes, const std::string& save_id) {
  std::string sharding;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    sharding += fmt::format("{}{}:{{\"saved_offsets\":[{}]}}", i == 0 ? "" : ",", json_quoted(tensors[i].name),
                            fmt::join(boxes[i].offsets, ","));
  }
  return {{"DCP_SHARDING_INFO", "{" + sharding + "}"}, {"DCP_VERSION", "1.0"}, {"format", "pt"}, {"save_id", save_id}};
}

class ShardWriter {
 public:
  ShardWriter(FileSystem& system, const SaveTarget& target, const CheckpointContent& content)
      : system_(system), target_(target), content_(content) {
    part_.save_id = target.save_id;
    part_.step = content.step;
    part_.world_size = target.world_size;
    part_.library_version = FSDP_VERSION;
    part_.scalars = content.scalars;
    for (const ShardView& view : content.views) part_.tensors.push_back({view.name, view.dtype, view.shape, view.kind});
  }

  void write_boxes(const std::string& name, const std::vector<PlannedBox>& planned) {
    std::vector<SafetensorsTensor> tensors;
    std::vector<Box> boxes;
    for (const auto& [index, box] : planned) {
      const ShardView& view = content_.views[index];
      boxes.push_back(box_on_disk(view.kind, box));
      tensors.push_back({view.name, view.dtype, boxes.back().sizes});
    }
    const auto metadata = shard_metadata(tensors, boxes, target_.save_id);
    const SafetensorsLayout layout = lay_out_safetensors(std::move(tensors), metadata);
    std::vector<std::uint64_t> hashes(planned.size());
    write_file(name, layout, [&](std::size_t i) {
      const std::span<const std::byte> bytes = row_major_bytes(content_.views[planned[i].view], planned[i].box);
      hashes[i] = xxh3_64(bytes);
      return bytes;
    });
    for (const std::size_t i : layout.order) {
      part_.extents.push_back({part_.files.size() - 1, planned[i].view, planned[i].box, layout.tensors[i].begin,
                               layout.tensors[i].end, hashes[i]});
    }
  }

  void write_rank_state(const std::string& key, const std::vector<std::byte>& state) {
    const std::string name = rank_file_name(key, target_.rank, target_.world_size);
    if (!is_file_name(name)) {
      throw CheckpointError(
          fmt::format("rank state \"{:.64}\": expected a name of letters, digits, '.', '_' and '-'", key));
    }
    const auto numel = static_cast<std::int64_t>(state.size());
    const SafetensorsLayout layout = lay_out_safetensors({{key, DType::kUInt8, {numel}}},
                                                         {{"format", "pt"}, {"save_id", target_.save_id}});
    write_file(name, layout, [&](std::size_t) { return std::span(state); });
  }

  Manifest finish() {
    // The names of this rank's files must be as durable as their bytes before rank 0 commits.
    for (const char* directory : {"model", "optim", "rank"}) sync_directory(system_, target_.directory / directory);
    return std::move(part_);
  }

 private:
  // Of a row-major tensor every box lies in one piece where it is; of a permuted one it is put in order first.
  std::span<const std::byte> row_major_bytes(const ShardView& view, const Box& box) {
    const std::size_t bytes = static_cast<std::size_t>(numel_of(box.sizes)) * size_of(view.dtype);
    if (is_row_major(view.shape, view.strides)) return {first_byte(view, box), bytes};
    buffer_.resize(bytes);
    pack_box(view, box, buffer_);
    return buffer_;
  }

  template <class BytesOf>
  void write_file(const std::string& name, const SafetensorsLayout& layout, BytesOf bytes_of) {
    const auto head = std::as_bytes(std::span(layout.head));
    File file = File::create(system_, target_.directory / name, 0600);
    file.reserve(layout.file_bytes);
    Xxh3Stream whole;
    whole.update(head);
    file.write(0, head);
    for (const std::size_t i : layout.order) {
      const std::span<const std::byte> bytes = bytes_of(i);
      whole.update(bytes);
      file.write(layout.tensors[i].begin, bytes);
    }
    file.sync();
    file.close();
    part_.files.push_back({name, layout.file_bytes, head.size(), xxh3_64(head), whole.hex()});
  }

  FileSystem& system_;
  const SaveTarget& target_;
  const CheckpointContent& content_;
  Manifest part_;
  std::vector<std::byte> buffer_;
};

void write_kind(ShardWriter& writer, const SaveTarget& target, ShardKind kind,
                const std::vector<std::vector<PlannedBox>>& files) {
  const std::size_t file_count = kind == ShardKind::kParameter ? target.model_files : target.optim_files;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (!files[i].empty()) writer.write_boxes(shard_file_name(kind, target.rank, i, file_count), files[i]);
  }
}

}  // namespace

ShardPlan plan_shards(std::span<const ShardView> views) {
  check_views(views);
  ShardPlan plan;
  for (std::size_t i = 0; i < views.size(); ++i) {
    const ShardView& view = views[i];
    std::vector<Box> boxes = boxes_main_first({view.shape, view.strides, view.begin, view.end});
    auto& files = view.kind == ShardKind::kParameter ? plan.model : plan.optim;
    files.resize(std::max(files.size(), boxes.size()));
    for (std::size_t file = 0; file < boxes.size(); ++file) files[file].push_back({i, std::move(boxes[file])});
  }
  return plan;
}

std::string shard_file_name(ShardKind kind, int rank, std::size_t file, std::size_t files) {
  // "model" in the name is part of the layout's pattern, whatever the kind.
  return fmt::format("{}/shard-{:05}-model-{:05}-of-{:05}.safetensors", directory_of(kind), rank + 1, file + 1, files);
}

std::string rank_file_name(const std::string& key, int rank, int world_size) {
  return fmt::format("rank/{}-{:05}-of-{:05}.safetensors", key, rank, world_size);
}

Manifest write_shards(FileSystem& system, const SaveTarget& target, const CheckpointContent& content,
                      const ShardPlan& plan) {
  ShardWriter writer(system, target, content);
  write_kind(writer, target, ShardKind::kParameter, plan.model);
  write_kind(writer, target, ShardKind::kOptimizer, plan.optim);
  for (const auto& [key, state] : content.rank_state) writer.write_rank_state(key, state);
  return writer.finish();
}

}  // namespace fsdp
