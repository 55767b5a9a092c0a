#include "device/cuda/cuda_driver.h"

#include <dlfcn.h>
#include <string>

namespace mooncake {

Result<CudaDriver> CudaDriver::load(const char* library) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return Error{ErrorCode::kUnsupported, "there is no CUDA driver: " + std::string(::dlerror()) +
                                              ". NVIDIA's driver for Linux brings it"};
  }
  CudaDriver driver;
  std::string missing;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
    if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  // Through a second macro, a name becomes a text with its version.
#define MOONCAKE_CUDA_TEXT(name) #name
#define MOONCAKE_CUDA_FIND(function) find(MOONCAKE_CUDA_TEXT(function), driver.function);
  MOONCAKE_CUDA_FUNCTIONS(MOONCAKE_CUDA_FIND)
#undef MOONCAKE_CUDA_FIND
#undef MOONCAKE_CUDA_TEXT
  if (missing.empty()) return driver;
  return Error{ErrorCode::kUnsupported, "the CUDA driver " + std::string(library) + " lacks " +
                                            missing + ". A driver of CUDA 12 or later has it"};
}

}  // namespace mooncake
