#pragma once

#include <memory>

#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// Opens the driver of NVIDIA's devices (libcuda.so.1), and makes no context on any of them.
// kUnsupported: this machine has no driver or no device, the driver is too old, or this build has no
// cuda.h. Calls fail with kSystem once the driver has shut down at the program's end.
Result<std::unique_ptr<Accelerator>> openCuda();

}  // namespace mooncake
