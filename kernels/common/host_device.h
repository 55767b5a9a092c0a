#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Code in kernels/common runs on the CPU and on GPUs, and gives the same bits on both. So each
// float operation is written out: fusedSum() where a product is added without being rounded,
// product() and quotient() where it is rounded first. Compilers must neither fuse nor loosen any
// operation: -ffp-contract=off on the CPU, no --use_fast_math for nvcc.
#ifdef __CUDACC__
#define MOONCAKE_HOST_DEVICE __host__ __device__
#else
#define MOONCAKE_HOST_DEVICE
#endif

namespace mooncake::ep {

MOONCAKE_HOST_DEVICE inline uint32_t bitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

MOONCAKE_HOST_DEVICE inline float floatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// a * b + c, rounded once.
MOONCAKE_HOST_DEVICE inline float fusedSum(float a, float b, float c) { return fmaf(a, b, c); }

// Written out because nvcc fuses a plain product into a sum that follows.
MOONCAKE_HOST_DEVICE inline float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

MOONCAKE_HOST_DEVICE inline float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

}  // namespace mooncake::ep
