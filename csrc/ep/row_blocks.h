#pragma once

#include "ep/rows.h"
#include "kernels/common/fp8.h"
#include "kernels/common/logfmt.h"

// Declarations that all versions of the row functions share.
namespace mooncake::ep {

static_assert(kBlock == kFp8Block && kBlock == kLogfmtBlock);

// The versions that are built for this architecture.
extern const RowFunctions kPortableRows;
#if defined(__x86_64__)
extern const RowFunctions kAvx2Rows;
extern const RowFunctions kAvx512Rows;
#endif

// Plain arithmetic for blocks that the vectors of a version do not handle: short blocks, and blocks
// with an infinity or a NaN.
void castBlockToFp8(const uint16_t* block, size_t channels, bool roundScale, uint8_t* out,
                    float* scale);

// combineRows() of channels [begin, end).
void combineChannels(std::span<const WeightedRow> rows, size_t begin, size_t end, uint16_t* out);

// LogFMT of one version, block by block; blocks are full unless said otherwise.
struct LogfmtBlocks {
  LogfmtHeader (*header)(const uint16_t* block);
  void (*encode)(const uint16_t* block, LogfmtHeader header, std::byte* out);
  // Adds the coded block, times the weight, to the sums.
  void (*addCoded)(const std::byte* block, LogfmtHeader header, float weight, float* sums);
};

size_t encodeLogfmtRow(const LogfmtBlocks& blocks, const uint16_t* row, size_t hidden,
                       std::byte* out);
void combineLogfmtRows(const LogfmtBlocks& blocks, std::span<const WeightedRow> rows, size_t hidden,
                       uint16_t* out);

}  // namespace mooncake::ep
