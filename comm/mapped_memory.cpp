#include "comm/mapped_memory.h"

#include <cerrno>
#include <limits>

#include <sys/mman.h>

#include "comm/system_call.h"

namespace fsdp {
namespace {

std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

}  // namespace

std::size_t round_up_to_page(std::size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

UniqueFd make_memfd(std::size_t bytes) {
  if (bytes > static_cast<std::size_t>(std::numeric_limits<off_t>::max())) {
    throw std::system_error(EFBIG, std::generic_category(), "memfd_create");
  }
  UniqueFd fd(::memfd_create("fsdp", MFD_CLOEXEC));
  if (!fd) throw_errno("memfd_create");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw_errno("ftruncate");
  return fd;
}

void populate(std::span<std::byte> part) {
  if (part.empty() || ::madvise(part.data(), part.size(), MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) throw_errno("madvise(MADV_POPULATE_WRITE)");
  // Before Linux 5.14 there is nothing better than a touch. The pages are fresh, so a zero changes nothing.
  for (std::size_t i = 0; i < part.size(); i += page_bytes()) static_cast<volatile std::byte&>(part[i]) = std::byte{};
}

MappedMemory::MappedMemory(std::size_t bytes) : MappedMemory(bytes, MAP_SHARED | MAP_ANONYMOUS, -1) {}

MappedMemory::MappedMemory(const UniqueFd& memfd, std::size_t bytes) : MappedMemory(bytes, MAP_SHARED, memfd.get()) {}

MappedMemory::MappedMemory(std::size_t bytes, int flags, int fd) {
  if (bytes == 0) return;
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (address == MAP_FAILED) throw_errno("mmap");
  span_ = {static_cast<std::byte*>(address), bytes};
}

MappedMemory::~MappedMemory() {
  if (!span_.empty()) ::munmap(span_.data(), span_.size());
}

}  // namespace fsdp
