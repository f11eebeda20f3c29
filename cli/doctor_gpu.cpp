// Facts of the NVIDIA driver and libraries, by dlopen: the declarations are those of cuda.h, nccl.h and cudnn.h, which need
// not be there.
#include <dlfcn.h>

#include <array>
#include <memory>

#include "cli/doctor.h"
#include "cli/doctor_gpu_rules.h"

namespace fsdp {
namespace {

constexpr int kSuccess = 0;

class Library {
 public:
  explicit Library(const char* name) : handle_(::dlopen(name, RTLD_LAZY | RTLD_LOCAL)) {
    if (handle_ == nullptr) error_ = ::dlerror();
  }
  // Never unloaded: a driver's library starts threads.
  const std::string& error() const { return error_; }
  // Null where the library or the function is not there.
  template <class Function>
  Function* function(const char* name) const {
    return handle_ == nullptr ? nullptr : reinterpret_cast<Function*>(::dlsym(handle_, name));
  }

 private:
  void* handle_;
  std::string error_;
};

template <class Function, class... Args>
bool call(Function* function, Args... args) {
  return function != nullptr && static_cast<int>(function(args...)) == kSuccess;
}

GpuFacts facts_of(const Library& cuda, int device, int count) {
  GpuFacts gpu;
  std::array<char, 256> text{};
  if (call(cuda.function<int(char*, int, int)>("cuDeviceGetName"), text.data(), static_cast<int>(text.size()), device))
    gpu.name = text.data();
  if (call(cuda.function<int(char*, int, int)>("cuDeviceGetPCIBusId"), text.data(), static_cast<int>(text.size()),
           device))
    gpu.bus_id = text.data();
  std::size_t bytes = 0;
  if (call(cuda.function<int(std::size_t*, int)>("cuDeviceTotalMem_v2"), &bytes, device)) gpu.memory_bytes = bytes;
  for (int peer = 0; peer < count; ++peer) {
    int can = 0;
    call(cuda.function<int(int*, int, int)>("cuDeviceCanAccessPeer"), &can, device, peer);
    gpu.reaches.push_back(peer == device || can != 0);
  }
  return gpu;
}

int version_of(std::initializer_list<const char*> libraries, const char* function) {
  for (const char* name : libraries) {
    int version = 0;
    if (call(Library(name).function<int(int*)>(function), &version)) return version;
  }
  return 0;
}

}  // namespace

std::vector<Finding> examine_gpus() {
  GpuSystemFacts facts;
  const Library cuda("libcuda.so.1");
  facts.driver_error = cuda.error();
  int count = 0;
  if (facts.driver_error.empty() && !call(cuda.function<int(unsigned)>("cuInit"), 0U))
    facts.driver_error = "cuInit failed";
  if (facts.driver_error.empty()) {
    call(cuda.function<int(int*)>("cuDriverGetVersion"), &facts.driver_cuda);
    call(cuda.function<int(int*)>("cuDeviceGetCount"), &count);
    facts.runtime_cuda = version_of({"libcudart.so.13", "libcudart.so.12"}, "cudaRuntimeGetVersion");
    facts.nccl = version_of({"libnccl.so.2"}, "ncclGetVersion");
    if (auto* version = Library("libcudnn.so.9").function<std::size_t()>("cudnnGetVersion"))
      facts.cudnn = static_cast<int>(version());
  }
  for (int device = 0; device < count; ++device) facts.gpus.push_back(facts_of(cuda, device, count));
  return judge_gpus(facts);
}

}  // namespace fsdp
