#pragma once

#include "kernels/device.h"
#include "kernels/probe.h"

// Writes `value` + i into word i: shows that a kernel is loaded, gets its argument, and runs.
extern "C" __global__ void __launch_bounds__(1024)
    mooncake_probe(const __grid_constant__ mooncake::kernels::ProbeArguments arguments) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < arguments.count) arguments.out[index] = arguments.value + index;
}
