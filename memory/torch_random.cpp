#include "memory/torch_random.h"

#include <mutex>

#include <ATen/Context.h>

namespace fsdp {

at::Tensor random_state() {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace fsdp
