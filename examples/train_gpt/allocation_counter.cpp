#include "examples/train_gpt/allocation_counter.h"

#include <cstring>
#include <new>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

namespace gpt {

// A deleter gets the data pointer and nothing else, so size and owner lie in front of the data, in a block as large as LibTorch's alignment.
struct alignas(64) AllocationCounter::Header {
  AllocationCounter* owner;
  std::size_t bytes;
};

AllocationCounter& AllocationCounter::install() {
  auto* counter = new AllocationCounter;
  c10::SetCPUAllocator(counter, /*priority=*/100);
  return *counter;
}

c10::DataPtr AllocationCounter::allocate(std::size_t bytes) {
  if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
  auto* header = new (c10::alloc_cpu(sizeof(Header) + bytes)) Header{this, bytes};
  const auto live = live_.fetch_add(bytes) + bytes;
  for (auto peak = peak_.load(); live > peak && !peak_.compare_exchange_weak(peak, live);) {
  }
  void* data = header + 1;
  return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr AllocationCounter::raw_deleter() const { return &release; }

void AllocationCounter::copy_data(void* destination, const void* source, std::size_t count) const {
  std::memcpy(destination, source, count);
}

void AllocationCounter::release(void* data) {
  if (data == nullptr) return;
  auto* header = static_cast<Header*>(data) - 1;
  header->owner->live_ -= header->bytes;
  c10::free_cpu(header);
}

}  // namespace gpt
