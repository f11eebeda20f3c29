#include "checkpoint/strict_json.h"

#include <algorithm>
#include <unordered_set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <fsdp/error.h>

namespace fsdp {
namespace {
constexpr std::size_t kMaxDepth = 4;
constexpr std::size_t kMaxNameBytes = 4096;
}  // namespace

std::string name_fault(std::string_view name) {
  if (name.empty()) return "name is empty";
  if (name.size() > kMaxNameBytes) return fmt::format("name of {} bytes is longer than {}", name.size(), kMaxNameBytes);
  const bool has_control = std::any_of(name.begin(), name.end(),
                                       [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
  return has_control ? "name has a control character" : "";
}

class JsonReader::Events : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Events(JsonReader& reader) : reader_(reader) {}

  bool null() override { reader_.refuse("null is not allowed"); }
  bool boolean(bool) override { reader_.refuse("true and false are not allowed"); }
  bool number_float(double, const std::string& text) override {
    reader_.refuse(fmt::format("number {} is not an integer of 64 bits", text));
  }
  bool binary(binary_t&) override { reader_.refuse("binary values are not allowed"); }
  bool number_integer(std::int64_t value) override { return expect_inside(), reader_.on_negative(value), true; }
  bool number_unsigned(std::uint64_t value) override { return expect_inside(), reader_.on_number(value), true; }
  bool string(std::string& value) override { return expect_inside(), reader_.on_string(value), true; }

  bool start_object(std::size_t) override { return reader_.on_object(), open(true); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return expect_inside(), reader_.on_array(), open(false); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    if (const std::string fault = name_fault(name); !fault.empty()) reader_.refuse(fault);
    reader_.keys_.back() = name;
    if (!seen_.back().insert(name).second) reader_.refuse("key stands twice");
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    reader_.refuse(fmt::format("not JSON at byte {}", position));
  }

 private:
  void expect_inside() const {
    if (reader_.depth() == 0) reader_.refuse("expected one object");
  }

  bool open(bool is_object) {
    if (reader_.depth() == kMaxDepth) reader_.refuse(fmt::format("nested deeper than {}", kMaxDepth));
    reader_.keys_.emplace_back(is_object ? "" : "[]");
    // One set per open container keeps the two stacks level; an array's stays empty.
    seen_.emplace_back(is_object ? 8 : 0);
    return true;
  }

  bool close() {
    reader_.keys_.pop_back();
    seen_.pop_back();
    reader_.on_end();
    return true;
  }

  JsonReader& reader_;
  std::vector<std::unordered_set<std::string>> seen_;
};

void JsonReader::read(std::string_view text) {
  keys_.clear();
  if (text.empty() || text.front() != '{') refuse("expected { as the first byte");
  // The parser takes a NUL byte for the end of its input and would never see what follows.
  if (text.find('\0') != std::string_view::npos) refuse("has a NUL byte");
  Events events(*this);
  nlohmann::json::sax_parse(text.begin(), text.end(), &events);
}

std::string JsonReader::where() const {
  std::string path;
  for (const std::string& name : keys_) {
    path += path.empty() || name.empty() || name == "[]" ? name : "." + name;
  }
  return path;
}

void JsonReader::refuse(const std::string& reason) const {
  throw CheckpointError(keys_.empty() ? reason : fmt::format("{}: {}", where(), reason));
}

void JsonReader::on_negative(std::int64_t value) { refuse(fmt::format("number {} is negative", value)); }

std::string json_quoted(std::string_view text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw CheckpointError("name or value is not UTF-8: " +
                          nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
  }
}

}  // namespace fsdp
