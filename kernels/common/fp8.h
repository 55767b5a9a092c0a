#pragma once

#include "kernels/common/bf16.h"

// FP8 of the kind e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f and
// 0xff are NaN, 0x7e is 448. kFp8Block channels share a float32 scale: value = code * scale.
namespace mooncake::ep {

constexpr int kFp8Block = 128;
constexpr float kFp8Largest = 448.0f;
constexpr float kFp8LeastAmax = 1e-4f;

// Rounds to nearest, ties to even; values beyond the largest become the largest.
MOONCAKE_HOST_DEVICE inline uint8_t floatToE4m3(float value) {
  const uint32_t bits = bitsOf(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7fffffff;
  constexpr uint32_t kInfinity = 0x7f800000, kLargest = 0x43e00000;
  constexpr uint32_t kLeastNormal = 0x3c800000;  // 2^-6
  if (magnitude > kInfinity) return uint8_t(sign | 0x7f);
  if (magnitude >= kLargest) return uint8_t(sign | 0x7e);
  if (magnitude < kLeastNormal) {
    // Floats near 2^14 are 2^-9 apart, as the subnormal codes are: the sum rounds.
    constexpr float kRounder = 16384.0f;
    return uint8_t(sign | (bitsOf(floatOf(magnitude) + kRounder) - bitsOf(kRounder)));
  }
  const uint32_t rounded = (magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  return uint8_t(sign | (rounded - ((127 - 7) << 3)));
}

MOONCAKE_HOST_DEVICE inline float e4m3ToFloat(uint8_t code) {
  const uint32_t sign = uint32_t(code & 0x80) << 24;
  const uint32_t magnitude = code & 0x7f;
  if (magnitude == 0x7f) return floatOf(sign | 0x7fc00000);
  if (magnitude < 8) return floatOf(sign | bitsOf(product(float(magnitude), 0x1p-9f)));
  return floatOf(sign | ((magnitude + ((127 - 7) << 3)) << 20));
}

struct Fp8Scale {
  float scale;    // a code times this is the value
  float inverse;  // a value times this is rounded to the code
};

// One step towards the largest magnitude of a block, as bf16. A NaN affects its own channel only.
MOONCAKE_HOST_DEVICE inline uint16_t largerMagnitude(uint16_t largest, uint16_t value) {
  const uint16_t magnitude = bf16Magnitude(value);
  return magnitude > largest && magnitude <= kBf16Infinity ? magnitude : largest;
}

// Scale of a block with the largest magnitude `amax`. `roundScale`: the next power of two at or
// above, which eight bits can hold.
MOONCAKE_HOST_DEVICE inline Fp8Scale fp8Scale(float amax, bool roundScale) {
  if (amax < kFp8LeastAmax) amax = kFp8LeastAmax;
  const float scale = quotient(amax, kFp8Largest);
  if (!roundScale) return {scale, quotient(kFp8Largest, amax)};
  const uint32_t exponent = (bitsOf(scale) + 0x7fffff) >> 23;
  const float power = floatOf(exponent << 23);
  return {power, quotient(1.0f, power)};
}

// The code of a channel of that block. The sign is taken from the channel: zero times infinity has
// one on some processors only.
MOONCAKE_HOST_DEVICE inline uint8_t castToE4m3(uint16_t value, Fp8Scale scale) {
  const uint8_t code = floatToE4m3(product(bf16ToFloat(value), scale.inverse));
  return uint8_t((code & 0x7f) | ((value >> 8) & 0x80));
}

// The exponent of a rounded scale; 255 is NaN.
MOONCAKE_HOST_DEVICE inline uint8_t ue8m0Of(float scale) { return uint8_t(bitsOf(scale) >> 23); }

}  // namespace mooncake::ep
