// Construction of modules that do not fit on one device: parameters get no memory, only notes of how they are to be
// filled; fsdp::shard then fills each rank's shares.
#pragma once

#include <cstdint>
#include <utility>

namespace torch::nn {
class Module;
}

namespace fsdp {

// While one lives, on its thread: empty, zeros, ones, full, rand and randn of at least 64 KiB make tensors without
// memory, and uniform_, normal_, fill_ and zero_ on them (or on contiguous parts of them) are noted down. Smaller
// tensors are made as ever. All random numbers drawn by these operators, of tensors of any size, are keyed by (seed,
// number of the draw, element): the same whatever the number of ranks, and not those of LibTorch's generator. Any other
// operator works, too: it fills what it reads for as long as it runs; one that writes leaves the tensor with memory of
// its own. Reading such a tensor by raw pointer throws. Does not nest.
class DeferredInitScope {
 public:
  explicit DeferredInitScope(std::uint64_t seed);
  DeferredInitScope(const DeferredInitScope&) = delete;
  DeferredInitScope& operator=(const DeferredInitScope&) = delete;
  ~DeferredInitScope();
};

// auto model = fsdp::deferred_init(/*seed=*/7, [&] { return std::make_shared<GPT>(config); });
// Every rank passes the same seed.
template <class Make>
auto deferred_init(std::uint64_t seed, Make&& make) {
  const DeferredInitScope scope(seed);
  return std::forward<Make>(make)();
}

// Gives every parameter and buffer of the module memory and its values, as a module that is not sharded needs them: the
// one-process twin of a sharded run.
void materialize(torch::nn::Module& module);

}  // namespace fsdp
