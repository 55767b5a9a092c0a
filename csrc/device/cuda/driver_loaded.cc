#include "device/cuda/driver_loaded.h"

#include <cstdint>
#include <dlfcn.h>
#include <link.h>
#include <string_view>

namespace mooncake {
namespace {

// Values of cuda.h, which a build without CUDA does not have.
constexpr int kMemoryTypeAttribute = 2;     // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int kDeviceOrdinalAttribute = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr unsigned kDeviceMemory = 2;       // CU_MEMORYTYPE_DEVICE

using PointerGetAttribute = int (*)(void* data, int attribute, uintptr_t pointer);

// Looked up each time, because the driver may be loaded later than this library.
PointerGetAttribute loadedFunction() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  ::dlclose(library);  // drops the count that RTLD_NOLOAD took; the library stays loaded
  return reinterpret_cast<PointerGetAttribute>(::dlsym(library, "cuPointerGetAttribute"));
}

}  // namespace

// dlopen() would look into the file system for a library that is not loaded: 60 us.
bool isCudaLoaded() {
  const auto isCuda = [](dl_phdr_info* library, size_t, void*) {
    return int(std::string_view(library->dlpi_name).find("/libcuda.so") != std::string_view::npos);
  };
  return ::dl_iterate_phdr(isCuda, nullptr) != 0;
}

MemoryPlace placeInLoadedCuda(const void* address) {
  const PointerGetAttribute ask = loadedFunction();
  const auto pointer = reinterpret_cast<uintptr_t>(address);
  unsigned type = 0;
  // An error means that the driver does not know the memory.
  if (ask == nullptr || ask(&type, kMemoryTypeAttribute, pointer) != 0 || type != kDeviceMemory)
    return {};
  MemoryPlace place{.kind = MemoryKind::kDevice, .device = 0};
  ask(&place.device, kDeviceOrdinalAttribute, pointer);
  return place;
}

}  // namespace mooncake
