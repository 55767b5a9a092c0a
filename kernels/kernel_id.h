#pragma once

#include <cstddef>
#include <cstdint>

// The kernels of this library, for the code that launches them. Knows neither CUDA nor torch.
namespace mooncake {

enum class KernelId : uint32_t {
  kProbe,
};

// Their names in the fatbin, in the order of KernelId.
inline constexpr const char* kKernelNames[] = {
    "mooncake_probe",
};
inline constexpr size_t kKernelCount = sizeof(kKernelNames) / sizeof(kKernelNames[0]);

inline constexpr const char* kernelName(KernelId kernel) {
  return kKernelNames[static_cast<size_t>(kernel)];
}

}  // namespace mooncake
