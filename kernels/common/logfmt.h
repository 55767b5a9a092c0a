#pragma once

#include "kernels/common/bf16.h"

// LogFMT-10: 128 channels of bf16 in 160 bytes. A channel has ten bits: a sign and a code of nine
// bits, which counts steps on a logarithmic scale down from the block's largest magnitude.
//
//   magnitude of code c = largest * P((511 - c) * step)      c = 1 ... 511
//   magnitude of code 0 = 0
//
//   step      in units of 2^-18 octaves, chosen so that code 1 reaches the smallest magnitude that
//             is not zero, but at most 32 octaves below the largest; at least 2^-9 octaves, which
//             is finer than bf16
//   P(t)      2^-t: the whole octaves are the exponent, the rest is the polynomial negativePower()
//
// A channel takes the code with the nearest magnitude, the lower one if two are equally near. So
// the rounding is without bias in the values, not in their logarithms, and depends on
// negativePower() only: log2Of() finds two codes to compare, and the step.
//
// A row of `hidden` channels has blocks of kLogfmtBlock channels; the last one has the rest:
//
//   | header of each block, 4 bytes    | zeros up to | block | block | ... |
//   | uint16 largest  uint16 step      | 16 bytes    |       |       |     |
//
//   coded block, 160 bytes                              raw block, step == 0
//   | 128 bytes: low eight bits of channel i's code     | bf16 x channels, zeros up to 16 bytes |
//   |  16 bytes: bit i % 8 of byte i / 8: ninth bit     |
//   |  16 bytes: likewise: the sign                     |
//
// These blocks are raw: a short last block, a block with an infinity or a NaN, and a block with all
// magnitudes below 2^-64, such as zeros (so that no subnormal float appears anywhere).
// All numbers are little-endian.
namespace mooncake::ep {

constexpr int kLogfmtBlock = 128;
constexpr int kLogfmtCodedBytes = kLogfmtBlock * 10 / 8;
constexpr int kLogfmtNinthBits = kLogfmtBlock;                 // offset in a block
constexpr int kLogfmtSigns = kLogfmtBlock + kLogfmtBlock / 8;  // offset in a block
constexpr int kLogfmtLargestCode = 511;
constexpr int kLogfmtUnitBits = 18;  // 2^18 units are one octave
constexpr float kLogfmtUnits = float(1 << kLogfmtUnitBits);
constexpr uint32_t kLogfmtLeastStep = 1 << (kLogfmtUnitBits - 9);
constexpr float kLogfmtMostOctaves = 32.0f;
constexpr uint16_t kLogfmtLeastLargest = (127 - 64) << 7;  // 2^-64 as bf16

struct LogfmtHeader {
  uint16_t largest;  // bf16
  uint16_t step;     // 0: the block is raw
};

// Coefficients of 1 + f * (a + f * (b + f * c)), within 1.1e-4 of 2^-f for f = 0 ... 1 and equal to
// it at both ends, for f in units.
constexpr float kPowerA = -0.69142181f / kLogfmtUnits;
constexpr float kPowerB = 0.23055579f / kLogfmtUnits / kLogfmtUnits;
constexpr float kPowerC = -0.03913398f / kLogfmtUnits / kLogfmtUnits / kLogfmtUnits;

// Coefficients of x * (a + x * (b + x * (c + x * d))), within 1.2e-4 of log2(1 + x), x = 0 ... 1.
constexpr float kLogA = 1.43872574f;
constexpr float kLogB = -0.67778397f;
constexpr float kLogC = 0.32118891f;
constexpr float kLogD = -0.08213068f;

// 2^-t, t in units.
MOONCAKE_HOST_DEVICE inline float negativePower(uint32_t t) {
  const float f = float(t & ((1u << kLogfmtUnitBits) - 1));
  const float power = fusedSum(fusedSum(fusedSum(kPowerC, f, kPowerB), f, kPowerA), f, 1.0f);
  return floatOf(bitsOf(power) - ((t >> kLogfmtUnitBits) << 23));
}

MOONCAKE_HOST_DEVICE inline float logfmtMagnitude(uint32_t code, LogfmtHeader header) {
  if (code == 0) return 0.0f;
  return product(bf16ToFloat(header.largest),
                 negativePower((kLogfmtLargestCode - code) * header.step));
}

// log2 of a bf16 magnitude, too high by 127. A subnormal one gives a value below all normal ones.
MOONCAKE_HOST_DEVICE inline float log2Of(uint16_t magnitude) {
  const float x = product(float(magnitude & 0x7f), 0x1p-7f);
  const float slope = fusedSum(fusedSum(fusedSum(kLogD, x, kLogC), x, kLogB), x, kLogA);
  return fusedSum(slope, x, float(magnitude >> 7));
}

// Header of a full block. `largest` is its largest magnitude (bf16; kBf16Infinity or more if a
// channel is infinite or NaN), `smallest` its smallest one that is not zero.
MOONCAKE_HOST_DEVICE inline LogfmtHeader logfmtHeader(uint16_t largest, uint16_t smallest) {
  if (largest < kLogfmtLeastLargest || largest >= kBf16Infinity) return {0, 0};
  float octaves = log2Of(largest) - log2Of(smallest);
  if (octaves > kLogfmtMostOctaves) octaves = kLogfmtMostOctaves;
  constexpr uint32_t kSteps = kLogfmtLargestCode - 1;
  const uint32_t step = (uint32_t(product(octaves, kLogfmtUnits)) + kSteps - 1) / kSteps;
  return {largest, uint16_t(step < kLogfmtLeastStep ? kLogfmtLeastStep : step)};
}

// Code of a magnitude in a block with that header.
MOONCAKE_HOST_DEVICE inline uint32_t logfmtCode(uint16_t magnitude, LogfmtHeader header) {
  const float stepsPerOctave = quotient(kLogfmtUnits, float(header.step));
  const float below = product(log2Of(header.largest) - log2Of(magnitude), stepsPerOctave);
  // `below` is truncated, so the nearest code is `upper` or the one below, unless `below` is wrong
  // by nearly half a step. It is wrong by less than a quarter.
  const uint32_t skipped =
      below < float(kLogfmtLargestCode - 1) ? uint32_t(below) : kLogfmtLargestCode - 1;
  const uint32_t upper = kLogfmtLargestCode - skipped;
  const float value = bf16ToFloat(magnitude);
  const float down = value - logfmtMagnitude(upper - 1, header);
  const float up = logfmtMagnitude(upper, header) - value;
  return down <= up ? upper - 1 : upper;
}

MOONCAKE_HOST_DEVICE inline uint32_t logfmtHeaderBytes(uint32_t hidden) {
  const uint32_t blocks = (hidden + kLogfmtBlock - 1) / kLogfmtBlock;
  return (blocks * uint32_t(sizeof(LogfmtHeader)) + 15) / 16 * 16;
}

// Bytes of a block with this many channels.
MOONCAKE_HOST_DEVICE inline uint32_t logfmtBlockBytes(LogfmtHeader header, uint32_t channels) {
  return header.step != 0 ? uint32_t(kLogfmtCodedBytes) : (channels * 2 + 15) / 16 * 16;
}

}  // namespace mooncake::ep
