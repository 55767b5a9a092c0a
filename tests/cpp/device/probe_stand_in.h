#pragma once

#include <cstring>

#include "device/accelerator.h"
#include "device/kernel_launch.h"
#include "kernels/kernel_id.h"
#include "kernels/probe.h"

namespace mooncake::testing {

// The work of kernel `probe`, thread by thread.
inline Status runProbe(DeviceStream, const KernelLaunch& launch) {
  kernels::ProbeArguments arguments;
  if (launch.kernel != KernelId::kProbe || launch.arguments.size() != sizeof(arguments))
    return {ErrorCode::kInvalidArgument, "is no launch of the probe"};
  std::memcpy(&arguments, launch.arguments.data(), sizeof(arguments));
  for (uint32_t i = 0; i < launch.grid * launch.block; ++i)
    if (i < arguments.count) arguments.out[i] = arguments.value + i;
  return {};
}

}  // namespace mooncake::testing
