#include "checkpoint/manifest.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "checkpoint/strict_json.h"
#include "checkpoint/xxh3.h"

namespace fsdp {
namespace {

// The boxes of one tensor, each against those that begin before it ends in the first dimension: shards of rows have few
// such.
void check_tensor(const ManifestTensor& tensor, std::vector<const Box*> boxes) {
  std::int64_t covered = 0;
  const std::int64_t numel = numel_of(tensor.shape);
  for (const Box* box : boxes) {
    covered = std::min(covered + numel_of(box->sizes), numel + 1);  // more than all is one value: it cannot overflow
    if (covered > numel) {
      throw CheckpointError(fmt::format(
          "{}: the ranks hold more than the {} elements of shape {}: every element must be held by exactly one rank",
          tensor.name, numel, tensor.shape));
    }
  }
  if (covered < numel) {
    throw CheckpointError(
        fmt::format("{}: the ranks hold {} elements, shape {} has {}: every element must be held by exactly one rank",
                    tensor.name, covered, tensor.shape, numel));
  }
  if (tensor.shape.empty()) return;
  std::sort(boxes.begin(), boxes.end(), [](const Box* a, const Box* b) { return a->offsets < b->offsets; });
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const std::int64_t end = boxes[i]->offsets[0] + boxes[i]->sizes[0];
    for (std::size_t j = i + 1; j < boxes.size() && boxes[j]->offsets[0] < end; ++j) {
      if (intersect(*boxes[i], *boxes[j])) {
        throw CheckpointError(
            fmt::format("{}: the boxes at {} and {} overlap: every element must be held by exactly one rank",
                        tensor.name, boxes[i]->offsets, boxes[j]->offsets));
      }
    }
  }
}

// "[\n<record>,\n<record>\n]"
template <class Records, class ToText>
std::string lines_of(const Records& records, ToText to_text) {
  std::string text = "[";
  const char* separator = "\n";
  for (const auto& record : records) {
    text += separator + to_text(record);
    separator = ",\n";
  }
  return text + "\n]";
}

template <class Map, class ToText>
std::string object_of(const Map& map, ToText to_text) {
  std::string text;
  for (const auto& [key, value] : map) {
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", json_quoted(key), to_text(value));
  }
  return "{" + text + "}";
}

std::string tensor_line(const ManifestTensor& tensor) {
  return fmt::format(R"({{"name":{},"dtype":"{}","shape":[{}],"kind":"{}"}})", json_quoted(tensor.name),
                     name_of(tensor.dtype), fmt::join(tensor.shape, ","),
                     tensor.kind == ShardKind::kParameter ? "parameter" : "optimizer");
}

std::string file_line(const ManifestFile& file) {
  return fmt::format(R"({{"name":{},"bytes":{},"head_bytes":{},"head_xxh3_64":"{}","xxh3_128":"{}"}})",
                     json_quoted(file.name), file.bytes, file.head_bytes, hex_of(file.head_xxh3_64), file.xxh3_128);
}

std::string extent_line(const Manifest& manifest, const ManifestExtent& extent) {
  return fmt::format(R"({{"file":{},"tensor":{},"offsets":[{}],"sizes":[{}],"bytes":[{},{}],"xxh3_64":"{}"}})",
                     json_quoted(manifest.files[extent.file].name), json_quoted(manifest.tensors[extent.tensor].name),
                     fmt::join(extent.box.offsets, ","), fmt::join(extent.box.sizes, ","), extent.begin, extent.end,
                     hex_of(extent.xxh3_64));
}

}  // namespace

std::string_view directory_of(ShardKind kind) {
  switch (kind) {
    case ShardKind::kParameter: return "model";
    case ShardKind::kOptimizer: return "optim";
    case ShardKind::kGradient: break;
  }
  throw InvalidArgument("gradients are not saved: expected views of kind kParameter or kOptimizer");
}

std::string to_json(const Manifest& manifest) {
  std::string text = fmt::format(
      "{{\"format_version\":{},\n\"save_id\":{},\n\"step\":{},\n\"world_size\":{},\n\"library_version\":{},\n",
      kManifestVersion, json_quoted(manifest.save_id), manifest.step, manifest.world_size,
      json_quoted(manifest.library_version));
  text += "\"tensors\":" + lines_of(manifest.tensors, tensor_line) + ",\n";
  text += "\"tied\":" + object_of(manifest.tied, [](const std::string& name) { return json_quoted(name); }) + ",\n";
  text += "\"files\":" + lines_of(manifest.files, file_line) + ",\n";
  text += "\"extents\":" +
          lines_of(manifest.extents, [&](const ManifestExtent& extent) { return extent_line(manifest, extent); }) +
          ",\n";
  text += "\"scalars\":" + object_of(manifest.scalars, [](std::int64_t value) { return std::to_string(value); }) +
          ",\n";
  return text + fmt::format("\"manifest_xxh3_128\":\"{}\"}}\n", xxh3_128(text));
}

Manifest merge(std::vector<Manifest> parts) {
  Manifest whole = std::exchange(parts.front(), {});
  std::map<std::pair<ShardKind, std::string>, std::size_t> index;
  for (std::size_t i = 0; i < whole.tensors.size(); ++i) {
    index.emplace(std::pair(whole.tensors[i].kind, whole.tensors[i].name), i);
  }
  for (Manifest& part : std::span(parts).subspan(1)) {
    std::vector<std::size_t> to_whole;
    for (const ManifestTensor& tensor : part.tensors) {
      const auto [known, added] = index.emplace(std::pair(tensor.kind, tensor.name), whole.tensors.size());
      if (added) {
        whole.tensors.push_back(tensor);
      } else if (!(whole.tensors[known->second] == tensor)) {
        const ManifestTensor& first = whole.tensors[known->second];
        throw CheckpointError(
            fmt::format("{}: ranks disagree: {} of shape {} and {} of shape {}: every rank must hold the same model",
                        tensor.name, name_of(first.dtype), first.shape, name_of(tensor.dtype), tensor.shape));
      }
      to_whole.push_back(known->second);
    }
    for (ManifestExtent& extent : part.extents) {
      extent.tensor = to_whole[extent.tensor];
      extent.file += whole.files.size();
      whole.extents.push_back(std::move(extent));
    }
    std::move(part.files.begin(), part.files.end(), std::back_inserter(whole.files));
  }
  return whole;
}

void check_coverage(const Manifest& manifest) {
  std::vector<std::vector<const Box*>> boxes(manifest.tensors.size());
  for (const ManifestExtent& extent : manifest.extents) boxes[extent.tensor].push_back(&extent.box);
  for (std::size_t i = 0; i < boxes.size(); ++i) check_tensor(manifest.tensors[i], std::move(boxes[i]));
}

}  // namespace fsdp
