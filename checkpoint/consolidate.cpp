#include "checkpoint/consolidate.h"

#include <algorithm>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "checkpoint/box_copy.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/tensor_match.h"

namespace fsdp {
namespace {

constexpr std::int64_t kReadBytes = std::int64_t{4} << 20;  // of a permuted view: rows read at once, one row at least

void write_tensors(FileSystem& system, const std::filesystem::path& path, const ConsolidatedContent& content) {
  std::vector<SafetensorsTensor> tensors;
  for (const TensorInfo& tensor : content.tensors) tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  std::map<std::string, std::string> metadata = content.metadata;
  metadata.emplace("format", "pt");
  const SafetensorsLayout layout = lay_out_safetensors(std::move(tensors), metadata);
  File file = File::create(system, path, 0666);
  file.reserve(layout.file_bytes);
  file.write(0, std::as_bytes(std::span(layout.head)));
  std::vector<std::byte> buffer;
  for (const std::size_t i : layout.order) {
    buffer.resize(layout.tensors[i].end - layout.tensors[i].begin);
    content.fetch(content.tensors[i], buffer);
    file.write(layout.tensors[i].begin, buffer);
  }
  file.sync();
  file.close();
}

// The directory that holds `file`, for fsync.
std::filesystem::path directory_with(const std::filesystem::path& file) {
  return file.has_parent_path() ? file.parent_path() : ".";
}

// The second names of tied tensors, as the file and the model know them. In __metadata__ they stand as safetensors' own
// Python package writes them: second name -> name.
Aliases aliases_of(const SafetensorsHeader& header, const std::map<std::string, std::string>& tied) {
  Aliases aliases;
  aliases.instead.insert(header.metadata.begin(), header.metadata.end());
  for (const auto& [second, name] : tied) {
    aliases.instead.emplace(name, second);
    if (const auto further = header.metadata.find(second); further != header.metadata.end()) {
      aliases.instead.emplace(name, further->second);
    }
    aliases.not_needed.insert(second);
  }
  return aliases;
}

// A permuted range is not one piece of the file: whole rows of its boxes are read and put where they belong.
void read_permuted(const File& file, const SafetensorsTensor& tensor, const ShardView& view, const Box& box) {
  const auto element_bytes = static_cast<std::int64_t>(size_of(view.dtype));
  const std::int64_t row_bytes = numel_of(std::span(view.shape).subspan(1)) * element_bytes;
  const std::int64_t rows_at_once = std::max<std::int64_t>(1, kReadBytes / row_bytes);
  std::vector<std::byte> buffer;
  for (std::int64_t row = box.offsets[0]; row < box.offsets[0] + box.sizes[0]; row += rows_at_once) {
    const std::int64_t rows = std::min(rows_at_once, box.offsets[0] + box.sizes[0] - row);
    buffer.resize(static_cast<std::size_t>(rows * row_bytes));
    file.read(tensor.begin + static_cast<std::uint64_t>(row * row_bytes), buffer);
    Box slab{std::vector<std::int64_t>(view.shape.size(), 0), view.shape};
    slab.offsets[0] = row;
    slab.sizes[0] = rows;
    unpack_region(*intersect(box, slab), slab, buffer, view);
  }
}

void read_view(const File& file, const SafetensorsTensor& tensor, const ShardView& view) {
  if (view.begin == view.end) return;
  const std::size_t element_bytes = size_of(view.dtype);
  if (is_row_major(view.shape, view.strides)) {
    const std::size_t bytes = static_cast<std::size_t>(view.end - view.begin) * element_bytes;
    return file.read(tensor.begin + static_cast<std::uint64_t>(view.begin) * element_bytes, {view.data, bytes});
  }
  for (const Box& box : boxes_of({view.shape, view.strides, view.begin, view.end})) {
    read_permuted(file, tensor, view, box);
  }
}

// What the file offers, as match_views wants it.
std::vector<ManifestTensor> offered_by(const SafetensorsHeader& header) {
  std::vector<ManifestTensor> offered;
  for (const SafetensorsTensor& tensor : header.tensors) {
    offered.push_back({tensor.name, tensor.dtype, tensor.shape, ShardKind::kParameter});
  }
  return offered;
}

SafetensorsHeader read_header(const File& file) {
  try {
    return read_safetensors_header(file.bytes(),
                                   [&](std::uint64_t offset, std::span<std::byte> bytes) { file.read(offset, bytes); });
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format("{}: {}: the file is damaged or no safetensors file of supported dtypes",
                                      file.path().string(), error.what()));
  }
}

}  // namespace

void write_consolidated(FileSystem& system, const std::filesystem::path& file, const ConsolidatedContent& content) {
  const std::filesystem::path temporary = fmt::format("{}.tmp-{}", file.string(), random_id());
  try {
    write_tensors(system, temporary, content);
    rename_path(system, temporary, file);
    sync_directory(system, directory_with(file));
  } catch (...) {
    // Whatever `fetch` threw, too, goes on to the caller; a temporary file that cannot be removed must not take its
    // place.
    system.unlink(temporary.c_str());
    throw;
  }
}

void read_consolidated(FileSystem& system, const std::filesystem::path& file, std::span<const ShardView> views,
                       const std::map<std::string, std::string>& tied) {
  check_views(views);
  const File opened = File::open(system, file);
  const SafetensorsHeader header = read_header(opened);
  std::vector<std::size_t> found;
  try {
    found = match_views(views, offered_by(header), aliases_of(header, tied));
  } catch (const CheckpointError& error) {
    throw CheckpointError(fmt::format("load of {} failed: {}", file.string(), error.what()));
  }
  for (std::size_t i = 0; i < views.size(); ++i) read_view(opened, header.tensors[found[i]], views[i]);
}

void write_consolidated(const std::filesystem::path& file, const std::vector<TensorInfo>& tensors,
                        const std::map<std::string, std::string>& metadata,
                        const std::function<void(const TensorInfo&, std::span<std::byte>)>& fetch) {
  FileSystem system;
  write_consolidated(system, file, {tensors, metadata, fetch});
}

void read_consolidated(const std::filesystem::path& file, std::span<const ShardView> views,
                       const std::map<std::string, std::string>& tied) {
  FileSystem system;
  read_consolidated(system, file, views, tied);
}

}  // namespace fsdp
