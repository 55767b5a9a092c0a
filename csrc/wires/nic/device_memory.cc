#include "wires/nic/device_memory.h"

#include "device/cuda/driver_loaded.h"

namespace mooncake {
namespace {

class DriverMemoryPlaces final : public MemoryPlaces {
 public:
  bool hasDevice() const override { return isCudaLoaded(); }

  NicMemoryPlace of(const std::byte* memory) const override {
    const MemoryPlace place = placeInLoadedCuda(memory);
    if (place.kind != MemoryKind::kDevice) return {};
    return {.isCuda = true, .device = place.device};
  }
};

}  // namespace

const MemoryPlaces& MemoryPlaces::real() {
  static const DriverMemoryPlaces places;
  return places;
}

}  // namespace mooncake
