#pragma once

namespace mooncake {

// Returns whether this process has loaded the driver of CUDA devices. Loads nothing.
bool isCudaLoaded();

}  // namespace mooncake
