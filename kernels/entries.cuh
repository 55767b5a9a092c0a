#pragma once

#include "kernels/all_to_all.cuh"
#include "kernels/collectives.cuh"

// The kernels for collectives, under the names of kernel_id.h. One block of 512 threads has all
// registers that it wants: no kernel spills.
#define MOONCAKE_REDUCE(name, type)                                            \
  extern "C" __global__ void __launch_bounds__(512, 1) mooncake_reduce_##name( \
      const __grid_constant__ mooncake::kernels::ReduceArguments arguments) {  \
    using namespace mooncake::kernels;                                         \
    reduceAll<type>(arguments);                                                \
  }
MOONCAKE_REDUCE(uint8, uint8_t)
MOONCAKE_REDUCE(int8, int8_t)
MOONCAKE_REDUCE(uint16, uint16_t)
MOONCAKE_REDUCE(int16, int16_t)
MOONCAKE_REDUCE(uint32, uint32_t)
MOONCAKE_REDUCE(int32, int32_t)
MOONCAKE_REDUCE(uint64, uint64_t)
MOONCAKE_REDUCE(int64, int64_t)
MOONCAKE_REDUCE(float16, Float16)
MOONCAKE_REDUCE(bfloat16, BFloat16)
MOONCAKE_REDUCE(float32, float)
MOONCAKE_REDUCE(float64, double)
MOONCAKE_REDUCE(bool, Bool)
MOONCAKE_REDUCE(complex64, Complex<float>)
MOONCAKE_REDUCE(complex128, Complex<double>)
#undef MOONCAKE_REDUCE

extern "C" __global__ void __launch_bounds__(512, 1)
    mooncake_move(const __grid_constant__ mooncake::kernels::MoveArguments arguments) {
  mooncake::kernels::moveAll(arguments);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    mooncake_all_to_all(const __grid_constant__ mooncake::kernels::AllToAllArguments arguments) {
  mooncake::kernels::exchangeSegments(arguments);
}

extern "C" __global__ void __launch_bounds__(1) mooncake_acknowledge(
    const __grid_constant__ mooncake::kernels::AcknowledgeArguments arguments) {
  mooncake::kernels::acknowledge(*arguments.state);
}
