#pragma once

#include <string>
#include <vector>

#include "device/accelerator.h"

namespace mooncake {

// A line about an accelerator, for a person to read.
struct DeviceFinding {
  bool works = false;
  std::string subject;
  std::string text;
};

// The way that data takes between processes of this host that use these two devices, which may be
// the same one.
enum class DeviceWay {
  kPeerAccess,  // kernels read and write the other device's memory
  kHostMemory,  // kernels read and write host memory that both processes map
  kEngine,      // copies to pinned memory, and the transports of the engine
};

// Returns the best way that the hardware and this build allow. Makes no context.
Result<DeviceWay> wayBetween(Accelerator& accelerator, bool hasKernels, int device, int peer);

// Describes the driver and its devices, and the ways between them. Makes no context.
std::vector<DeviceFinding> reportDevices(Accelerator& accelerator, bool hasKernels);

}  // namespace mooncake
