#include "device/cuda/kernel_image.h"

// For a build without nvcc.
namespace mooncake {

std::span<const std::byte> kernelImage() { return {}; }

}  // namespace mooncake
