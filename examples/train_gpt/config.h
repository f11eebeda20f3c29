// The shape of the model, and the conditions on it that flags can break. No torch header.
#pragma once

#include <cstdint>

namespace gpt {

// Text is read byte by byte, so the vocabulary is what a byte can be.
inline constexpr std::int64_t kVocabulary = 256;

struct Config {
  std::int64_t layers = 4;
  std::int64_t width = 128;  // divisible by heads
  std::int64_t heads = 4;
  std::int64_t context = 128;  // bytes that the model sees at once
};

}  // namespace gpt
