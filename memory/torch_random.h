// The state of LibTorch's default CPU generator, which all threads of a process share.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

at::Tensor random_state();  // bytes
void set_random_state(const at::Tensor& state);

}  // namespace fsdp
