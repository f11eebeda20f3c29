#include "checkpoint/manifest.h"

#include <algorithm>
#include <climits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "checkpoint/strict_json.h"
#include "checkpoint/xxh3.h"

namespace fsdp {
namespace {

constexpr std::size_t kMaxFields = 8;  // of a record, unknown ones included: enough to find that they are unknown
constexpr std::size_t kMaxDimensions = 64;
constexpr std::size_t kMaxRecords = std::size_t{1} << 24;

// The fields of one JSON object: numbers and arrays of numbers as vectors.
struct Record {
  std::map<std::string, std::string> strings;
  std::map<std::string, std::vector<std::uint64_t>> numbers;
};

// Sections in the order in which they must come, since extents refer to tensors and files: format_version and the other
// fields of the root, tensors, tied, files, extents, scalars, checksum.
class ManifestReader : public JsonReader {
 public:
  Manifest take() {
    const Record root = std::exchange(root_, {});
    manifest_.save_id = hex_field(root, "save_id", 1);
    manifest_.library_version = string_field(root, "library_version");
    manifest_.step = int64_field(root, "step");
    manifest_.world_size = static_cast<int>(std::min<std::int64_t>(int64_field(root, "world_size"), INT_MAX));
    if (manifest_.world_size < 1) refuse("world_size: expected at least 1");
    hex_field(root, "manifest_xxh3_128", 2);
    number_field(root, "format_version", 1);
    expect_fields(root, 6);
    if (sections_ != 5) refuse("expected tensors, tied, files, extents and scalars");
    for (const auto& [second, name] : manifest_.tied) {
      if (!tensors_.contains({"model", name})) refuse(fmt::format("tied.{}: no parameter is named {}", second, name));
    }
    return std::move(manifest_);
  }

 protected:
  void on_object() override {
    if (depth() == 0) return;
    if (depth() == 1) {
      if (key(0) != "tied" && key(0) != "scalars") refuse("unknown object");
      ++sections_;
    } else if (depth() != 2 || !in_table()) {
      refuse("object where none may stand");
    }
    record_ = {};
  }

  void on_array() override {
    if (depth() == 1) {
      if (!in_table()) refuse("unknown array");
      ++sections_;
    } else if (depth() == 3 && in_table()) {
      add_field(record_).numbers[key(2)];
    } else {
      refuse("array where none may stand");
    }
  }

  void on_string(std::string& value) override {
    if (depth() == 1) {
      add_field(root_).strings[key(0)] = std::move(value);
    } else if (depth() == 2 && key(0) == "tied") {
      manifest_.tied[key(1)] = std::move(value);
    } else if (depth() == 3) {
      add_field(record_).strings[key(2)] = std::move(value);
    } else {
      refuse("string where none may stand");
    }
  }

  void on_number(std::uint64_t value) override {
    if (depth() == 1) {
      if (key(0) == "format_version") check_version(value);
      add_field(root_).numbers[key(0)] = {value};
    } else if (depth() == 2 && key(0) == "scalars") {
      if (value > static_cast<std::uint64_t>(INT64_MAX)) refuse("number does not fit in 63 bits");
      manifest_.scalars[key(1)] = static_cast<std::int64_t>(value);
    } else if (depth() == 3) {
      add_field(record_).numbers[key(2)] = {value};
    } else if (depth() == 4) {
      std::vector<std::uint64_t>& numbers = record_.numbers[key(2)];
      if (numbers.size() == kMaxDimensions) refuse(fmt::format("more than {} numbers", kMaxDimensions));
      numbers.push_back(value);
    } else {
      refuse("number where none may stand");
    }
  }

  void on_negative(std::int64_t value) override {
    if (depth() != 2 || key(0) != "scalars") JsonReader::on_negative(value);
    manifest_.scalars[key(1)] = value;
  }

  void on_end() override {
    if (depth() != 2 || !in_table()) return;
    const std::size_t records = manifest_.tensors.size() + manifest_.files.size() + manifest_.extents.size();
    if (records == kMaxRecords) refuse(fmt::format("more than {} records", kMaxRecords));
    if (key(0) == "tensors") return add_tensor();
    if (key(0) == "files") return add_file();
    add_extent();
  }

 private:
  bool in_table() const { return key(0) == "tensors" || key(0) == "files" || key(0) == "extents"; }

  Record& add_field(Record& record) {
    if (record.strings.size() + record.numbers.size() == kMaxFields) refuse("unknown field");
    return record;
  }

  void check_version(std::uint64_t version) {
    if (version == kManifestVersion) return;
    refuse(fmt::format(
        "expected format {}, got {}: {}", kManifestVersion, version,
        version > kManifestVersion ? "written by a newer libfsdp; update this one" : "no release wrote it"));
  }

  // Duplicates are refused and every known field is asked for, so that the count finds the unknown ones.
  void expect_fields(const Record& record, std::size_t count) {
    if (record.strings.size() + record.numbers.size() != count) refuse("has an unknown field");
  }

  std::string string_field(const Record& record, const char* name) {
    const auto field = record.strings.find(name);
    if (field == record.strings.end()) refuse(fmt::format("expected text in field {}", name));
    return field->second;
  }

  // `words` groups of 16 hex digits.
  std::string hex_field(const Record& record, const char* name, std::size_t words) {
    std::string text = string_field(record, name);
    bool good = text.size() == 16 * words;
    for (std::size_t i = 0; good && i < words; ++i) {
      good = hex_value(std::string_view(text).substr(16 * i, 16)).has_value();
    }
    if (!good) refuse(fmt::format("{}: expected {} hex digits", name, 16 * words));
    return text;
  }

  const std::vector<std::uint64_t>& numbers_field(const Record& record, const char* name) {
    const auto field = record.numbers.find(name);
    if (field == record.numbers.end()) refuse(fmt::format("expected numbers in field {}", name));
    return field->second;
  }

  std::uint64_t number_field(const Record& record, const char* name, std::size_t count, std::size_t i = 0) {
    const std::vector<std::uint64_t>& numbers = numbers_field(record, name);
    if (numbers.size() != count) refuse(fmt::format("{}: expected {} numbers, got {}", name, count, numbers.size()));
    return numbers[i];
  }

  std::int64_t int64_field(const Record& record, const char* name) {
    const std::uint64_t value = number_field(record, name, 1);
    if (value > static_cast<std::uint64_t>(INT64_MAX)) refuse(fmt::format("{}: number does not fit in 63 bits", name));
    return static_cast<std::int64_t>(value);
  }

  std::vector<std::int64_t> sizes_field(const Record& record, const char* name) {
    std::vector<std::int64_t> sizes;
    for (const std::uint64_t value : numbers_field(record, name)) {
      if (value > static_cast<std::uint64_t>(INT64_MAX)) {
        refuse(fmt::format("{}: number does not fit in 63 bits", name));
      }
      sizes.push_back(static_cast<std::int64_t>(value));
    }
    return sizes;
  }

  void add_tensor() {
    ManifestTensor tensor{.name = string_field(record_, "name"), .dtype = {}, .shape = sizes_field(record_, "shape")};
    if (const std::string fault = name_fault(tensor.name); !fault.empty()) refuse(fault);
    const auto dtype = dtype_of(string_field(record_, "dtype"));
    if (!dtype) refuse(tensor.name + ": dtype is not known");
    tensor.dtype = *dtype;
    const std::string kind = string_field(record_, "kind");
    if (kind != "parameter" && kind != "optimizer") refuse(tensor.name + ": kind is not known");
    tensor.kind = kind == "parameter" ? ShardKind::kParameter : ShardKind::kOptimizer;
    expect_fields(record_, 4);
    const auto numel = checked_numel(tensor.shape);
    if (!numel || *numel > INT64_MAX / 8) refuse(fmt::format("{}: shape {} is too large", tensor.name, tensor.shape));
    if (!tensors_.emplace(std::pair(directory_of(tensor.kind), tensor.name), manifest_.tensors.size()).second) {
      refuse(tensor.name + ": stands twice");
    }
    manifest_.tensors.push_back(std::move(tensor));
  }

  void add_file() {
    ManifestFile file{.name = string_field(record_, "name"),
                      .bytes = number_field(record_, "bytes", 1),
                      .head_bytes = number_field(record_, "head_bytes", 1),
                      .head_xxh3_64 = *hex_value(hex_field(record_, "head_xxh3_64", 1)),
                      .xxh3_128 = hex_field(record_, "xxh3_128", 2)};
    expect_fields(record_, 5);
    if (!is_file_name(file.name)) refuse("name: expected model/, optim/ or rank/ and a plain file name");
    if (file.bytes > static_cast<std::uint64_t>(INT64_MAX) || file.head_bytes > file.bytes) {
      refuse(file.name + ": head_bytes do not fit in bytes");
    }
    if (!files_.emplace(file.name, manifest_.files.size()).second) refuse(file.name + ": stands twice");
    manifest_.files.push_back(std::move(file));
  }

  void add_extent() {
    const auto file = files_.find(string_field(record_, "file"));
    if (file == files_.end()) refuse("names a file that is not listed");
    const std::string directory = file->first.substr(0, file->first.find('/'));
    const auto tensor = tensors_.find({directory, string_field(record_, "tensor")});
    if (tensor == tensors_.end()) refuse("names a tensor that is not listed for " + directory);
    ManifestExtent extent{.file = file->second,
                          .tensor = tensor->second,
                          .box = {sizes_field(record_, "offsets"), sizes_field(record_, "sizes")},
                          .begin = number_field(record_, "bytes", 2, 0),
                          .end = number_field(record_, "bytes", 2, 1),
                          .xxh3_64 = *hex_value(hex_field(record_, "xxh3_64", 1))};
    expect_fields(record_, 6);
    check_extent(extent);
    manifest_.extents.push_back(std::move(extent));
  }

  void check_extent(const ManifestExtent& extent) {
    const ManifestTensor& tensor = manifest_.tensors[extent.tensor];
    const ManifestFile& file = manifest_.files[extent.file];
    const auto& [offsets, sizes] = extent.box;
    bool inside = offsets.size() == tensor.shape.size() && sizes.size() == tensor.shape.size();
    for (std::size_t i = 0; inside && i < sizes.size(); ++i) {
      inside = sizes[i] > 0 && sizes[i] <= tensor.shape[i] && offsets[i] <= tensor.shape[i] - sizes[i];
    }
    if (!inside) {
      refuse(fmt::format("{}: box at {} of {} does not lie in shape {}", tensor.name, offsets, sizes, tensor.shape));
    }
    if (extent.begin < file.head_bytes || extent.begin > extent.end || extent.end > file.bytes) {
      refuse(fmt::format("{}: bytes [{}, {}) do not lie in {}", tensor.name, extent.begin, extent.end, file.name));
    }
    if (extent.end - extent.begin != static_cast<std::uint64_t>(numel_of(sizes)) * size_of(tensor.dtype)) {
      refuse(
          fmt::format("{}: bytes [{}, {}) are not those of a box of {}", tensor.name, extent.begin, extent.end, sizes));
    }
  }

  Manifest manifest_;
  Record root_, record_;
  std::size_t sections_ = 0;
  std::map<std::pair<std::string, std::string>, std::size_t> tensors_;  // (directory, name) -> index
  std::map<std::string, std::size_t> files_;
};

// The checksum stands alone in the last line, so that no JSON has to be understood to check it.
void check_own_hash(std::string_view text) {
  const std::size_t last_line = text.empty() || text.back() != '\n' ? std::string_view::npos
                                                                    : text.rfind('\n', text.size() - 2);
  if (last_line == std::string_view::npos) {
    throw CheckpointError("the last line, its checksum, is missing: the file was cut off");
  }
  const std::string expected = fmt::format("\"manifest_xxh3_128\":\"{}\"}}\n", xxh3_128(text.substr(0, last_line + 1)));
  if (text.substr(last_line + 1) != expected) {
    throw CheckpointError("its text does not match the checksum in its last line");
  }
}

}  // namespace

bool is_file_name(std::string_view name) {
  const std::size_t slash = name.find('/');
  if (slash == std::string_view::npos) return false;
  const std::string_view directory = name.substr(0, slash), base = name.substr(slash + 1);
  if (directory != "model" && directory != "optim" && directory != "rank") return false;
  return !base.empty() && base.front() != '.' && base.size() <= NAME_MAX &&
         std::all_of(base.begin(), base.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
                  c == '-';
         });
}

Manifest parse_manifest(std::string_view text) {
  check_own_hash(text);
  ManifestReader reader;
  reader.read(text);
  return reader.take();
}

}  // namespace fsdp
