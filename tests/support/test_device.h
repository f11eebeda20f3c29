// A device for tests of what moves between devices: LibTorch's PrivateUse1, with memory that is the host's but counted,
// and kernels that are the CPU's on copies. A process that links this file has it.
#pragma once

#include <cstddef>

#include <c10/core/Device.h>

namespace fsdp::testing {

c10::Device test_device();
std::size_t test_device_bytes();  // allocated on it now

}  // namespace fsdp::testing
