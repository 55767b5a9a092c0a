#include "device/cuda/cuda_driver.h"

#include <dlfcn.h>
#include <string>

namespace mooncake {
namespace {

// Returns ", for CUDA 11.4,", or nothing if the driver does not tell its version.
std::string versionOf(const CudaDriver& driver) {
  int version = 0;
  if (driver.cuDriverGetVersion == nullptr || driver.cuDriverGetVersion(&version) != CUDA_SUCCESS)
    return {};
  return ", for CUDA " + std::to_string(version / 1000) + "." +
         std::to_string(version % 1000 / 10) + ",";
}

}  // namespace

Result<CudaDriver> CudaDriver::load(const char* library) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return Error{ErrorCode::kUnsupported, "there is no CUDA driver: " + std::string(::dlerror()) +
                                              ". NVIDIA's driver for Linux brings it"};
  }
  return find([handle](const char* name) { return ::dlsym(handle, name); }, library);
}

Result<CudaDriver> CudaDriver::find(const Lookup& lookup, const std::string& library) {
  CudaDriver driver;
  std::string missing;
  const auto findOne = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(lookup(name));
    if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  // Through a second macro, a name becomes a text with its version.
#define MOONCAKE_CUDA_TEXT(name) #name
#define MOONCAKE_CUDA_FIND(function) findOne(MOONCAKE_CUDA_TEXT(function), driver.function);
  MOONCAKE_CUDA_FUNCTIONS(MOONCAKE_CUDA_FIND)
#undef MOONCAKE_CUDA_FIND
#undef MOONCAKE_CUDA_TEXT
  if (missing.empty()) return driver;
  return Error{ErrorCode::kUnsupported, "the CUDA driver " + library + versionOf(driver) +
                                            " lacks " + missing +
                                            ". Install a driver for CUDA 12 or later"};
}

}  // namespace mooncake
