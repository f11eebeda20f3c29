// What is read as a meeting file is written as the same file again; nothing else is read.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "comm/meeting_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  const auto file = fsdp::parse_meeting_file({reinterpret_cast<const char*>(data), bytes});
  if (!file) return 0;
  const std::string text = fsdp::to_text(*file);
  const auto again = fsdp::parse_meeting_file(text);
  if (!again || fsdp::to_text(*again) != text || file->addresses.empty()) __builtin_trap();
  return 0;
}
