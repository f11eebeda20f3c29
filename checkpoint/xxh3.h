// XXH3 checksums: 64 bits for an extent, 128 for a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fsdp {

std::uint64_t xxh3_64(std::span<const std::byte> bytes);

// 16 lower-case hex digits and back; nullopt for any other text.
std::string hex_of(std::uint64_t value);
std::optional<std::uint64_t> hex_value(std::string_view digits);

// The 128-bit checksum of bytes that come in pieces.
class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();
  void update(std::span<const std::byte> bytes);
  // 32 hex digits, the high half first. May be followed by more updates.
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string xxh3_128(std::string_view text);

}  // namespace fsdp
