#include "checkpoint/xxh3.h"

#include <charconv>

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace fsdp {

struct Xxh3Stream::State {
  XXH3_state_t value;
};

std::uint64_t xxh3_64(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string hex_of(std::uint64_t value) { return fmt::format("{:016x}", value); }

std::optional<std::uint64_t> hex_value(std::string_view digits) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  // Comparing the text as well refuses upper case, which from_chars takes.
  if (error != std::errc{} || end != digits.data() + digits.size() || hex_of(value) != digits) return std::nullopt;
  return value;
}

Xxh3Stream::Xxh3Stream() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->value); }
Xxh3Stream::~Xxh3Stream() = default;

void Xxh3Stream::update(std::span<const std::byte> bytes) {
  XXH3_128bits_update(&state_->value, bytes.data(), bytes.size());
}

std::string Xxh3Stream::hex() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->value);
  return hex_of(hash.high64) + hex_of(hash.low64);
}

std::string xxh3_128(std::string_view text) {
  Xxh3Stream stream;
  stream.update(std::as_bytes(std::span(text)));
  return stream.hex();
}

}  // namespace fsdp
