#pragma once

#include <string_view>

#include "base/result.h"
#include "device/accelerator.h"

namespace mooncake {

// Returns the process's accelerator of this name: "host", "cuda", or "fake" in a build for tests.
// Opens it at the first call, and tries again after an error. It lives until the process ends, so
// that the program's last threads may still use it. kInvalidArgument: there is no such name.
// kUnsupported: this machine or build has none. Any thread.
Result<Accelerator*> openAccelerator(std::string_view name);

}  // namespace mooncake
