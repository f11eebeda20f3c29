#include "checkpoint/safetensors.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "checkpoint/reshard_plan.h"
#include "checkpoint/strict_json.h"

namespace fsdp {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::uint64_t kDataAlignment = 4096;
constexpr std::size_t kMaxTensors = std::size_t{1} << 20;
constexpr std::size_t kMaxMetadataEntries = std::size_t{1} << 16;
constexpr std::size_t kMaxDimensions = 64;
constexpr const char* kMetadataKey = "__metadata__";

std::uint64_t tensor_bytes(const SafetensorsTensor& tensor) {
  const auto numel = checked_numel(tensor.shape);
  std::uint64_t bytes = 0;
  if (!numel || __builtin_mul_overflow(static_cast<std::uint64_t>(*numel), size_of(tensor.dtype), &bytes)) {
    throw CheckpointError(fmt::format("{}: shape {} has more bytes than 64 bits can count", tensor.name, tensor.shape));
  }
  return bytes;
}

std::string header_json(const SafetensorsLayout& layout, const std::map<std::string, std::string>& metadata) {
  std::string json = fmt::format("{{\"{}\":{{", kMetadataKey);
  for (const auto& [key, value] : metadata) {
    json += fmt::format("{}{}:{}", json.back() == '{' ? "" : ",", json_quoted(key), json_quoted(value));
  }
  json += '}';
  for (const std::size_t index : layout.order) {
    const SafetensorsTensor& tensor = layout.tensors[index];
    json += fmt::format(",{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", json_quoted(tensor.name),
                        name_of(tensor.dtype), fmt::join(tensor.shape, ","), tensor.begin, tensor.end);
  }
  return json + '}';
}

std::string with_length_and_padding(std::string json) {
  const std::uint64_t unpadded = kLengthBytes + json.size();
  json.append((kDataAlignment - unpadded % kDataAlignment) % kDataAlignment, ' ');
  if (json.size() > kMaxHeaderBytes) {
    throw CheckpointError(
        fmt::format("header of {} bytes is longer than the {} that safetensors allows: write fewer tensors to a file",
                    json.size(), kMaxHeaderBytes));
  }
  std::string head;
  for (std::uint64_t i = 0; i < kLengthBytes; ++i) head += static_cast<char>((json.size() >> (8 * i)) & 0xff);
  return head + json;
}

class HeaderReader : public JsonReader {
 public:
  SafetensorsHeader header;

 protected:
  void on_object() override {
    if (depth() == 0) return;
    if (depth() > 1) refuse("expected dtype, shape and data_offsets, got an object");
    if (in_metadata()) return;
    if (header.tensors.size() == kMaxTensors) refuse(fmt::format("more than {} tensors", kMaxTensors));
    header.tensors.push_back({.name = key(0), .dtype = {}, .shape = {}});
    has_dtype_ = has_shape_ = false;
    offsets_.clear();
  }

  void on_array() override {
    if (depth() != 2 || in_metadata()) refuse("array where none may stand");
    if (key(1) == "shape") {
      has_shape_ = true;
    } else if (key(1) != "data_offsets") {
      refuse("unknown field");
    }
  }

  void on_string(std::string& value) override {
    if (depth() != 2) refuse("string where none may stand");
    if (in_metadata()) {
      if (header.metadata.size() == kMaxMetadataEntries) {
        refuse(fmt::format("more than {} entries", kMaxMetadataEntries));
      }
      header.metadata.emplace(key(1), std::move(value));
      return;
    }
    if (key(1) != "dtype") refuse("unknown field");
    const auto dtype = dtype_of(value);
    if (!dtype) refuse("dtype is not known");
    header.tensors.back().dtype = *dtype;
    has_dtype_ = true;
  }

  void on_number(std::uint64_t value) override {
    if (depth() != 3) refuse("number where none may stand");
    if (key(1) == "data_offsets") {
      if (offsets_.size() == 2) refuse("expected 2 offsets, got more");
      offsets_.push_back(value);
      return;
    }
    std::vector<std::int64_t>& shape = header.tensors.back().shape;
    if (shape.size() == kMaxDimensions) refuse(fmt::format("more than {} dimensions", kMaxDimensions));
    if (value > static_cast<std::uint64_t>(INT64_MAX)) refuse("size does not fit in 63 bits");
    shape.push_back(static_cast<std::int64_t>(value));
  }

  void on_end() override {
    if (depth() != 1 || in_metadata()) return;
    if (!has_dtype_ || !has_shape_ || offsets_.size() != 2) refuse("expected dtype, shape and two data_offsets");
    SafetensorsTensor& tensor = header.tensors.back();
    tensor.begin = offsets_[0];
    tensor.end = offsets_[1];
    if (tensor.begin > tensor.end) {
      refuse(fmt::format("data_offsets [{}, {}] end before they begin", tensor.begin, tensor.end));
    }
    if (const std::uint64_t expected = tensor_bytes(tensor); tensor.end - tensor.begin != expected) {
      refuse(fmt::format("expected {} bytes for shape {} of {}, got {}", expected, tensor.shape, name_of(tensor.dtype),
                         tensor.end - tensor.begin));
    }
  }

 private:
  bool in_metadata() const { return key(0) == kMetadataKey; }

  bool has_dtype_ = false, has_shape_ = false;
  std::vector<std::uint64_t> offsets_;
};

// The tensors must tile the data: first at 0, no gap, no overlap, last at the end of the file. Turns offsets into file
// positions.
void place_in_file(SafetensorsHeader& header, std::uint64_t file_bytes) {
  std::sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t position = 0;
  for (SafetensorsTensor& tensor : header.tensors) {
    if (tensor.begin != position) {
      throw CheckpointError(fmt::format("{}: expected data at offset {}, got {}: data has a gap or an overlap",
                                        tensor.name, position, tensor.begin));
    }
    position = tensor.end;
    if (position > file_bytes - header.data_begin) {
      throw CheckpointError(fmt::format("{}: data ends past the end of the file", tensor.name));
    }
    tensor.begin += header.data_begin;
    tensor.end += header.data_begin;
  }
  if (header.data_begin + position != file_bytes) {
    throw CheckpointError(fmt::format("expected a file of {} bytes, got {}", header.data_begin + position, file_bytes));
  }
}

}  // namespace

SafetensorsLayout lay_out_safetensors(std::vector<SafetensorsTensor> tensors,
                                      const std::map<std::string, std::string>& metadata) {
  SafetensorsLayout layout;
  layout.tensors = std::move(tensors);
  layout.order.resize(layout.tensors.size());
  std::iota(layout.order.begin(), layout.order.end(), std::size_t{0});
  // By falling size every tensor starts at a multiple of its own element size.
  std::sort(layout.order.begin(), layout.order.end(), [&](std::size_t a, std::size_t b) {
    const SafetensorsTensor &x = layout.tensors[a], &y = layout.tensors[b];
    return size_of(x.dtype) != size_of(y.dtype) ? size_of(x.dtype) > size_of(y.dtype) : x.name < y.name;
  });
  std::uint64_t position = 0;
  for (const std::size_t index : layout.order) {
    SafetensorsTensor& tensor = layout.tensors[index];
    const std::string fault = tensor.name == kMetadataKey ? "name is reserved" : name_fault(tensor.name);
    if (!fault.empty()) throw CheckpointError(fmt::format("tensor \"{:.64}\": {}", tensor.name, fault));
    tensor.begin = position;
    tensor.end = position += tensor_bytes(tensor);
  }
  layout.head = with_length_and_padding(header_json(layout, metadata));
  layout.file_bytes = layout.head.size() + position;
  for (SafetensorsTensor& tensor : layout.tensors) {
    tensor.begin += layout.head.size();
    tensor.end += layout.head.size();
  }
  return layout;
}

SafetensorsHeader read_safetensors_header(std::uint64_t file_bytes, const ReadAt& read_at) {
  if (file_bytes < kLengthBytes) {
    throw CheckpointError(fmt::format("expected at least {} bytes, got {}", kLengthBytes, file_bytes));
  }
  std::byte raw[kLengthBytes];
  read_at(0, raw);
  std::uint64_t header_bytes = 0;
  for (std::uint64_t i = 0; i < kLengthBytes; ++i) header_bytes |= std::to_integer<std::uint64_t>(raw[i]) << (8 * i);
  if (header_bytes > kMaxHeaderBytes) {
    throw CheckpointError(
        fmt::format("header of {} bytes is longer than the {} allowed", header_bytes, kMaxHeaderBytes));
  }
  if (header_bytes > file_bytes - kLengthBytes) {
    throw CheckpointError(
        fmt::format("header of {} bytes ends past the end of the file of {}", header_bytes, file_bytes));
  }

  std::string json(header_bytes, '\0');
  read_at(kLengthBytes, std::as_writable_bytes(std::span(json)));
  json.resize(json.find_last_not_of(' ') + 1);
  if (json.empty() || json.back() != '}') throw CheckpointError("header ends with something other than } and spaces");
  HeaderReader reader;
  reader.read(json);
  reader.header.data_begin = kLengthBytes + header_bytes;
  place_in_file(reader.header, file_bytes);
  return std::move(reader.header);
}

}  // namespace fsdp
