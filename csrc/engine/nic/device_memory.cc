#include "engine/nic/device_memory.h"

#include <cstdint>
#include <dlfcn.h>

namespace mooncake {
namespace {

// Values of cuda.h, which a build without CUDA does not have.
constexpr int kMemoryTypeAttribute = 2;     // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int kDeviceOrdinalAttribute = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr unsigned kDeviceMemory = 2;       // CU_MEMORYTYPE_DEVICE

using PointerGetAttribute = int (*)(void* data, int attribute, uintptr_t pointer);

// Looked up each time, because the driver may be loaded later than this library.
PointerGetAttribute driver() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  ::dlclose(library);  // drops the count that RTLD_NOLOAD took; the library stays loaded
  return reinterpret_cast<PointerGetAttribute>(::dlsym(library, "cuPointerGetAttribute"));
}

class DriverMemoryPlaces final : public MemoryPlaces {
 public:
  bool hasDevice() const override { return driver() != nullptr; }

  NicMemoryPlace of(const std::byte* memory) const override {
    const PointerGetAttribute ask = driver();
    const auto pointer = reinterpret_cast<uintptr_t>(memory);
    unsigned type = 0;
    // An error means that the driver does not know the memory.
    if (ask == nullptr || ask(&type, kMemoryTypeAttribute, pointer) != 0 || type != kDeviceMemory)
      return {};
    NicMemoryPlace place{.isCuda = true};
    ask(&place.device, kDeviceOrdinalAttribute, pointer);
    return place;
  }
};

}  // namespace

const MemoryPlaces& MemoryPlaces::real() {
  static const DriverMemoryPlaces places;
  return places;
}

}  // namespace mooncake
