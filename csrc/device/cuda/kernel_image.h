#pragma once

#include <cstddef>
#include <span>

namespace mooncake {

// Returns the fatbin of kernels/, which nvcc made for this build. Empty: there was no nvcc.
std::span<const std::byte> kernelImage();

}  // namespace mooncake
