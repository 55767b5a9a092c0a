#pragma once

#include "kernels/common/logfmt.h"
#include "kernels/warp.cuh"

// Rows in LogFMT-10 (kernels/common/logfmt.h), with the bits of csrc/ep/rows_logfmt.cc. A lane has
// four channels side by side.
namespace mooncake::kernels {

using mooncake::ep::kLogfmtBlock;
using mooncake::ep::LogfmtHeader;

constexpr unsigned kEachOfBlock = kLogfmtBlock / kLanes;

MC_DEVICE LogfmtHeader headerOfLanes(const uint16_t* values) {
  using namespace mooncake::ep;
  uint16_t largest = 0, smallest = kBf16Infinity;
  for (unsigned i = 0; i < kEachOfBlock; ++i) {
    const uint16_t magnitude = bf16Magnitude(values[i]);
    if (magnitude > largest) largest = magnitude;
    if (magnitude != 0 && magnitude < smallest) smallest = magnitude;
  }
  largest = combineLanes(largest, [](uint16_t a, uint16_t b) { return a > b ? a : b; });
  smallest = combineLanes(smallest, [](uint16_t a, uint16_t b) { return a < b ? a : b; });
  return logfmtHeader(largest, smallest);
}

// Writes one bit of each channel: a byte has the bits of two lanes.
MC_DEVICE void storeBits(unsigned char* to, uint32_t own) {
  const uint32_t other = __shfl_xor_sync(kAllLanes, own, 1);
  if (lane() % 2 == 0) to[lane() / 2] = static_cast<unsigned char>(own | other << 4);
}

MC_DEVICE void storeCoded(unsigned char* block, const uint16_t* values, LogfmtHeader header) {
  using namespace mooncake::ep;
  uint32_t low = 0, ninth = 0, signs = 0;
  for (unsigned i = 0; i < kEachOfBlock; ++i) {
    const uint32_t code = logfmtCode(bf16Magnitude(values[i]), header);
    low |= (code & 0xff) << (8 * i);
    ninth |= code >> 8 << i;
    signs |= uint32_t(values[i] >> 15) << i;
  }
  reinterpret_cast<uint32_t*>(block)[lane()] = low;
  storeBits(block + kLogfmtNinthBits, ninth);
  storeBits(block + kLogfmtSigns, signs);
}

// Encodes a row. One warp.
MC_DEVICE void encodeRow(unsigned char* row, const uint16_t* channels, size_t hidden) {
  using namespace mooncake::ep;
  const size_t blocks = (hidden + kLogfmtBlock - 1) / kLogfmtBlock;
  const size_t headerBytes = logfmtHeaderBytes(uint32_t(hidden));
  LogfmtHeader* const headers = reinterpret_cast<LogfmtHeader*>(row);
  for (size_t i = blocks + lane(); i < headerBytes / sizeof(LogfmtHeader); i += kLanes)
    headers[i] = {0, 0};
  unsigned char* next = row + headerBytes;
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * kLogfmtBlock, left = hidden - begin;
    const unsigned count = left < kLogfmtBlock ? unsigned(left) : unsigned(kLogfmtBlock);
    uint16_t values[kEachOfBlock] = {};
    for (unsigned i = 0; i < kEachOfBlock; ++i) {
      const unsigned channel = lane() * kEachOfBlock + i;
      if (channel < count) values[i] = channels[begin + channel];
    }
    LogfmtHeader header{0, 0};
    if (count == kLogfmtBlock) header = headerOfLanes(values);
    if (lane() == 0) headers[block] = header;
    const unsigned bytes = logfmtBlockBytes(header, count);
    if (header.step != 0) {
      storeCoded(next, values, header);
    } else {
      for (unsigned i = 0; i < kEachOfBlock; ++i) {
        const unsigned channel = lane() * kEachOfBlock + i;
        if (channel < bytes / sizeof(uint16_t))
          reinterpret_cast<uint16_t*>(next)[channel] = values[i];
      }
    }
    next += bytes;
  }
}

MC_DEVICE LogfmtHeader headerAt(const unsigned char* row, size_t block, unsigned count) {
  if (count < kLogfmtBlock) return {0, 0};
  return reinterpret_cast<const LogfmtHeader*>(row)[block];
}

// Adds this lane's channels of a block times the weight.
MC_DEVICE void addBlock(const unsigned char* block, LogfmtHeader header, unsigned count,
                        float weight, float* sums) {
  using namespace mooncake::ep;
  if (header.step == 0) {
    for (unsigned i = 0; i < kEachOfBlock; ++i) {
      const unsigned channel = lane() * kEachOfBlock + i;
      if (channel >= count) continue;
      const uint16_t value = reinterpret_cast<const uint16_t*>(block)[channel];
      sums[i] = fusedSum(bf16ToFloat(value), weight, sums[i]);
    }
    return;
  }
  const uint32_t low = reinterpret_cast<const uint32_t*>(block)[lane()];
  const unsigned shift = lane() % 2 * kEachOfBlock;
  const uint32_t ninth = block[kLogfmtNinthBits + lane() / 2] >> shift;
  const uint32_t signs = block[kLogfmtSigns + lane() / 2] >> shift;
  for (unsigned i = 0; i < kEachOfBlock; ++i) {
    const uint32_t code = (low >> (8 * i) & 0xff) | (ninth >> i & 1) << 8;
    const uint32_t magnitude = bitsOf(logfmtMagnitude(code, header));
    sums[i] = fusedSum(floatOf(magnitude | (signs >> i & 1) << 31), weight, sums[i]);
  }
}

}  // namespace mooncake::kernels
