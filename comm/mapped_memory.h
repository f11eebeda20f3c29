// Memory that ranks share: an anonymous mapping where ranks are threads, a memfd where they are processes.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "comm/unique_fd.h"

namespace fsdp {

std::size_t round_up_to_page(std::size_t bytes);

// An empty memfd of `bytes` zeros. Throws std::system_error where the machine can never hold that much.
UniqueFd make_memfd(std::size_t bytes);

// Takes the pages of a part of a fresh mapping now, on the caller's NUMA node: a full machine is a std::system_error here
// and not a SIGBUS later. REQUIRES it to start on a page.
void populate(std::span<std::byte> part);

// A shared, writable mapping of zeros. Zero bytes are legal and map nothing.
class MappedMemory {
 public:
  MappedMemory() = default;
  // Anonymous. Throws std::system_error, as does the next one.
  explicit MappedMemory(std::size_t bytes);
  MappedMemory(const UniqueFd& memfd, std::size_t bytes);
  MappedMemory(MappedMemory&& other) noexcept : span_(std::exchange(other.span_, {})) {}
  MappedMemory& operator=(MappedMemory&& other) noexcept {
    std::swap(span_, other.span_);
    return *this;
  }
  ~MappedMemory();

  std::span<std::byte> span() const { return span_; }

 private:
  MappedMemory(std::size_t bytes, int flags, int fd);

  std::span<std::byte> span_;
};

}  // namespace fsdp
