#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "ep/row_blocks.h"

// The loops over the blocks of LogFMT-10 rows, for all versions.
namespace mooncake::ep {
namespace {

// Header of the block at `begin`. A rank that goes on without us may overwrite a row while we read
// it. Then the result is thrown away, but no header leads out of the row's logfmtRowBytes().
LogfmtHeader headerAt(const void* row, size_t begin, size_t channels) {
  LogfmtHeader header;
  if (channels < kBlock) return {0, 0};
  std::memcpy(&header, static_cast<const std::byte*>(row) + begin / kBlock * sizeof(header),
              sizeof(header));
  return header;
}

}  // namespace

size_t logfmtPrefixBytes(size_t hidden) { return logfmtHeaderBytes(uint32_t(hidden)); }

size_t logfmtRowBytes(size_t hidden) {
  return logfmtPrefixBytes(hidden) + (hidden * sizeof(uint16_t) + 15) / 16 * 16;
}

size_t logfmtEncodedBytes(const std::byte* row, size_t hidden) {
  size_t bytes = logfmtPrefixBytes(hidden);
  for (size_t begin = 0; begin < hidden; begin += kBlock) {
    const size_t channels = std::min(kBlock, hidden - begin);
    bytes += logfmtBlockBytes(headerAt(row, begin, channels), uint32_t(channels));
  }
  return bytes;
}

size_t encodeLogfmtRow(const LogfmtBlocks& blocks, const uint16_t* row, size_t hidden,
                       std::byte* out) {
  std::memset(out, 0, logfmtPrefixBytes(hidden));
  std::byte* next = out + logfmtPrefixBytes(hidden);
  for (size_t begin = 0; begin < hidden; begin += kBlock) {
    const size_t channels = std::min(kBlock, hidden - begin);
    const LogfmtHeader header =
        channels == kBlock ? blocks.header(row + begin) : LogfmtHeader{0, 0};
    std::memcpy(out + begin / kBlock * sizeof(header), &header, sizeof(header));
    const size_t bytes = logfmtBlockBytes(header, uint32_t(channels));
    if (header.step != 0) {
      blocks.encode(row + begin, header, next);
    } else {
      const size_t used = channels * sizeof(uint16_t);
      std::memcpy(next, row + begin, used);
      std::memset(next + used, 0, bytes - used);
    }
    next += bytes;
  }
  return size_t(next - out);
}

void combineLogfmtRows(const LogfmtBlocks& blocks, std::span<const WeightedRow> rows, size_t hidden,
                       uint16_t* out) {
  // Position of the next block of each row.
  std::array<const std::byte*, 16> few;
  std::vector<const std::byte*> many(rows.size() > few.size() ? rows.size() : 0);
  const std::span<const std::byte*> next(many.empty() ? few.data() : many.data(), rows.size());
  for (size_t r = 0; r < rows.size(); ++r)
    next[r] = static_cast<const std::byte*>(rows[r].data) + logfmtPrefixBytes(hidden);

  for (size_t begin = 0; begin < hidden; begin += kBlock) {
    const size_t channels = std::min(kBlock, hidden - begin);
    std::array<float, kBlock> sums{};
    for (size_t r = 0; r < rows.size(); ++r) {
      const LogfmtHeader header = headerAt(rows[r].data, begin, channels);
      if (header.step != 0) {
        blocks.addCoded(next[r], header, rows[r].weight, sums.data());
      } else {
        for (size_t i = 0; i < channels; ++i) {
          uint16_t value;
          std::memcpy(&value, next[r] + i * sizeof(value), sizeof(value));
          sums[i] = fusedSum(bf16ToFloat(value), rows[r].weight, sums[i]);
        }
      }
      next[r] += logfmtBlockBytes(header, uint32_t(channels));
    }
    for (size_t i = 0; i < channels; ++i) out[begin + i] = floatToBf16(sums[i]);
  }
}

}  // namespace mooncake::ep
