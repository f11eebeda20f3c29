#include "tests/support/counting_allocator.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

namespace fsdp::testing {
namespace {

constexpr std::size_t kHeaderBytes = 64;
thread_local bool is_counted = false;
thread_local std::size_t counted = 0, failing_one = 0;
std::atomic<std::size_t> live{0}, peak{0}, allocations_made{0};

// raw_allocate hands out the data pointer alone, so the size is kept in front of it and context equals data.
void release(void* data) {
  if (data == nullptr) return;
  auto* block = static_cast<std::byte*>(data) - kHeaderBytes;
  std::size_t bytes = 0;
  std::memcpy(&bytes, block, sizeof(bytes));
  live.fetch_sub(bytes);
  std::free(block);
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    if (is_counted && counted++ == failing_one)
      TORCH_CHECK(false, "can't allocate memory: you tried to allocate ", bytes, " bytes.");
    auto* block = static_cast<std::byte*>(
        std::aligned_alloc(kHeaderBytes, (bytes + 2 * kHeaderBytes - 1) / kHeaderBytes * kHeaderBytes));
    if (block == nullptr) throw std::bad_alloc();
    std::memcpy(block, &bytes, sizeof(bytes));
    const std::size_t now = live.fetch_add(bytes) + bytes;
    allocations_made.fetch_add(1);
    for (std::size_t seen = peak.load(); seen < now && !peak.compare_exchange_weak(seen, now);) {
    }
    void* data = block + kHeaderBytes;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

}  // namespace

CountingAllocator& CountingAllocator::install() {
  static Allocator allocator;
  static CountingAllocator counter;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
  return counter;
}

std::size_t CountingAllocator::live_bytes() const { return live.load(); }
std::size_t CountingAllocator::peak_bytes() const { return peak.load(); }
void CountingAllocator::fail_at(std::size_t failing) {
  is_counted = true;
  counted = 0;
  failing_one = failing;
}

std::size_t CountingAllocator::stop_failing() {
  is_counted = false;
  return counted;
}

void CountingAllocator::reset_peak() { peak.store(live.load()); }
std::size_t CountingAllocator::allocations() const { return allocations_made.load(); }

}  // namespace fsdp::testing
