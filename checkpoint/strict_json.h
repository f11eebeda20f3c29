// JSON from files that may be damaged or hostile: read as events, nothing is built that the reader did not ask for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// A name as it may stand in a file: 1 to 4096 bytes, no control characters. Returns what is wrong with it, or "".
std::string name_fault(std::string_view name);

// Base of the readers. Refused for all of them: more than 4 containers around a value, duplicate keys of an object,
// keys that are no names (name_fault), numbers that are no integers of 64 bits, true, false, null, NUL bytes, and
// anything before or after the one object. What an event means, and which ones are legal where, the derived reader
// says.
class JsonReader {
 public:
  virtual ~JsonReader() = default;
  // Throws CheckpointError with the reason alone; the caller adds the file.
  void read(std::string_view text);

 protected:
  // Number of containers around the current value, and the key it has in the i-th of them, counted from the outside.
  std::size_t depth() const { return keys_.size(); }
  const std::string& key(std::size_t i) const { return keys_[i]; }
  // "extents[].offsets": where the current value stands, for messages.
  std::string where() const;
  [[noreturn]] void refuse(const std::string& reason) const;

  virtual void on_object() = 0;
  virtual void on_array() = 0;
  virtual void on_string(std::string& value) = 0;
  virtual void on_number(std::uint64_t value) = 0;
  virtual void on_negative(std::int64_t value);  // refuses
  virtual void on_end() = 0;                     // the object or array announced under these keys is complete

 private:
  class Events;
  std::vector<std::string> keys_;
};

// Text with quotes and escapes. Throws CheckpointError where it is not UTF-8.
std::string json_quoted(std::string_view text);

}  // namespace fsdp
