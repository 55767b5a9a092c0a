#pragma once

#include "device/device_types.h"

// The driver of CUDA devices as the program has loaded it. Nothing here loads it, so this is also
// for builds without cuda.h.
namespace mooncake {

bool isCudaLoaded();
// Returns the place of memory, as the driver reports it. kHost: the driver is not loaded, or does
// not know the memory as one of a device.
MemoryPlace placeInLoadedCuda(const void* address);

}  // namespace mooncake
