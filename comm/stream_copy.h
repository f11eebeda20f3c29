// Copies that do not drag their destination through the cache.
#pragma once

#include <cstddef>

namespace fsdp {

// From here on a copy uses non-temporal stores; below, the destination fits a core's cache and memcpy wins.
inline constexpr std::size_t kStreamCopyBytes = std::size_t{1} << 20;

// memcpy for memory that may be large. A plain store that misses first reads the line it is about to overwrite: 3 bytes
// moved per byte copied instead of 2. REQUIRES no overlap. The copy is visible to others after any release or barrier.
void stream_copy(std::byte* output, const std::byte* input, std::size_t bytes);

}  // namespace fsdp
