#pragma once

#include "kernels/device.h"

namespace mooncake::kernels {

template <typename Unit>
MC_DEVICE void copyUnits(unsigned char* to, const unsigned char* from, size_t bytes) {
  Unit* const target = reinterpret_cast<Unit*>(to);
  const Unit* const source = reinterpret_cast<const Unit*>(from);
  const size_t units = bytes / sizeof(Unit);
  for (size_t i = threadIdx.x; i < units; i += blockDim.x)
    storeUnit(target + i, loadUnit(source + i));
}

// Copies with all threads of the block, in the largest units that both addresses allow.
MC_DEVICE void copyBytes(unsigned char* to, const unsigned char* from, size_t bytes) {
  const size_t address = reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from);
  size_t copied = 0;
  if (address % sizeof(uint4) == 0) {
    copyUnits<uint4>(to, from, bytes);
    copied = bytes / sizeof(uint4) * sizeof(uint4);
  } else if (address % sizeof(uint32_t) == 0) {
    copyUnits<uint32_t>(to, from, bytes);
    copied = bytes / sizeof(uint32_t) * sizeof(uint32_t);
  }
  copyUnits<unsigned char>(to + copied, from + copied, bytes - copied);
}

MC_DEVICE void zeroBytes(unsigned char* to, size_t bytes) {
  for (size_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = 0;
}

}  // namespace mooncake::kernels
