#pragma once

#include "kernels/common/host_device.h"

// bfloat16 is the upper half of a float32.
namespace mooncake::ep {

constexpr uint16_t kBf16Infinity = 0x7f80;  // above it, without the sign, are the NaNs
constexpr uint16_t kBf16Nan = 0x7fc0;

MOONCAKE_HOST_DEVICE inline float bf16ToFloat(uint16_t value) {
  return floatOf(uint32_t(value) << 16);
}

// Rounds to nearest, ties to even. Every NaN becomes kBf16Nan, because the NaN of a sum differs
// between processors.
MOONCAKE_HOST_DEVICE inline uint16_t floatToBf16(float value) {
  const uint32_t bits = bitsOf(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return kBf16Nan;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

MOONCAKE_HOST_DEVICE inline uint16_t bf16Magnitude(uint16_t value) { return value & 0x7fff; }

}  // namespace mooncake::ep
