#pragma once

#include <cstdint>

#include "device/fake/fake_devices.h"

namespace fake_device {

// From here on the devices run the kernels of this library: their source, on the CPU (tests/simt).
void giveKernels(mooncake::FakeDevices& devices);
// Number of kernels that have begun.
uint64_t kernelsRun();
uint64_t blocksRun();  // and of their blocks

}  // namespace fake_device
