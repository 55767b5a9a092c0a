#include <algorithm>
#include <array>
#include <cstring>

#include "ep/row_blocks.h"

namespace mooncake::ep {
namespace {

void castRow(const uint16_t* row, size_t hidden, bool roundScale, uint8_t* out, float* scales) {
  for (size_t begin = 0; begin < hidden; begin += kBlock)
    castBlockToFp8(row + begin, std::min(kBlock, hidden - begin), roundScale, out + begin,
                   scales + begin / kBlock);
}

void copyPlainly(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

void combine(std::span<const WeightedRow> rows, size_t hidden, uint16_t* out) {
  combineChannels(rows, 0, hidden, out);
}

LogfmtHeader headerOf(const uint16_t* block) {
  uint16_t largest = 0, smallest = kBf16Infinity;
  for (size_t i = 0; i < kBlock; ++i) {
    const uint16_t magnitude = bf16Magnitude(block[i]);
    largest = std::max(largest, magnitude);
    if (magnitude != 0) smallest = std::min(smallest, magnitude);
  }
  return logfmtHeader(largest, smallest);
}

void encodeBlock(const uint16_t* block, LogfmtHeader header, std::byte* out) {
  std::memset(out + kLogfmtNinthBits, 0, kLogfmtCodedBytes - kLogfmtNinthBits);
  for (size_t i = 0; i < kBlock; ++i) {
    const uint32_t code = logfmtCode(bf16Magnitude(block[i]), header);
    out[i] = std::byte(code & 0xff);
    out[kLogfmtNinthBits + i / 8] |= std::byte((code >> 8) << (i % 8));
    out[kLogfmtSigns + i / 8] |= std::byte((block[i] >> 15) << (i % 8));
  }
}

void addCodedBlock(const std::byte* block, LogfmtHeader header, float weight, float* sums) {
  for (size_t i = 0; i < kBlock; ++i) {
    const auto bit = [&](size_t plane) {
      return (std::to_integer<uint32_t>(block[plane + i / 8]) >> (i % 8)) & 1;
    };
    const uint32_t code = std::to_integer<uint32_t>(block[i]) | bit(kLogfmtNinthBits) << 8;
    const uint32_t magnitude = bitsOf(logfmtMagnitude(code, header));
    sums[i] = fusedSum(floatOf(magnitude | bit(kLogfmtSigns) << 31), weight, sums[i]);
  }
}

constexpr LogfmtBlocks kBlocks{headerOf, encodeBlock, addCodedBlock};

size_t encode(const uint16_t* row, size_t hidden, std::byte* out) {
  return encodeLogfmtRow(kBlocks, row, hidden, out);
}

void combineLogfmt(std::span<const WeightedRow> rows, size_t hidden, uint16_t* out) {
  combineLogfmtRows(kBlocks, rows, hidden, out);
}

}  // namespace

const RowFunctions kPortableRows{castRow, copyPlainly, combine, encode, combineLogfmt};

void castBlockToFp8(const uint16_t* block, size_t channels, bool roundScale, uint8_t* out,
                    float* scale) {
  uint16_t largest = 0;
  for (size_t i = 0; i < channels; ++i) largest = largerMagnitude(largest, block[i]);
  const Fp8Scale chosen = fp8Scale(bf16ToFloat(largest), roundScale);
  for (size_t i = 0; i < channels; ++i) out[i] = castToE4m3(block[i], chosen);
  *scale = chosen.scale;
}

void combineChannels(std::span<const WeightedRow> rows, size_t begin, size_t end, uint16_t* out) {
  while (begin < end) {
    const size_t channels = std::min(kBlock, end - begin);
    std::array<float, kBlock> sums{};
    for (const WeightedRow& row : rows) {
      const uint16_t* values = static_cast<const uint16_t*>(row.data) + begin;
      for (size_t i = 0; i < channels; ++i)
        sums[i] = fusedSum(bf16ToFloat(values[i]), row.weight, sums[i]);
    }
    for (size_t i = 0; i < channels; ++i) out[begin + i] = floatToBf16(sums[i]);
    begin += channels;
  }
}

}  // namespace mooncake::ep
