#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cpu_cache.h"

// Functions for a token's row of bf16 channels on its way to the experts and back. The arithmetic
// is defined in kernels/common; every processor gives the same bits.
namespace mooncake::ep {

constexpr size_t kBlock = 128;  // channels that share a scale; the last block may be short

constexpr size_t scalesOf(size_t hidden) { return (hidden + kBlock - 1) / kBlock; }

// Casts a row to FP8 (e4m3fn) with one scale per block. `roundScale`: scales are powers of two.
void castRowToFp8(const uint16_t* row, size_t hidden, bool roundScale, uint8_t* out, float* scales);

// Packs the exponents of rounded scales, four in a word, the first one lowest; unused bytes are 0.
void packUe8m0(const float* scales, size_t count, int32_t* packed);

// The way of a copy: through the caches, if its target is read soon, or past them, which saves
// reading the target first.
enum class CopyHint { kCached, kStreamed };

// The faster way for rows of `bytes` in all. It is past the caches if source and target exceed this
// rank's share of the last-level cache, which the host's `ranks` divide evenly. Below that, streams
// take up to twice as long.
CopyHint copyHint(size_t bytes, int ranks);

// Bytes of one rank's share if `ranks` ranks are spread over the caches of `cores` cores.
size_t shareOfCache(const CpuCache& cache, size_t cores, int ranks);

// Like copyHint(), for memory that peers on other cores have just read, and read again. A few rows
// still stand in their caches, and a plain store first takes each line from there, one after the
// other. 56 KiB take up to 25 us that way, and 5 us past the caches.
CopyHint copyHintForPeers(size_t bytes, int ranks);

// A copy past the caches ends with a fence, which costs as much as copying a few hundred bytes.
inline constexpr size_t kLeastStreamedBytes = 1024;

// Stores after the return are seen after the row, with either hint.
void copyRow(void* to, const void* from, size_t bytes, CopyHint hint);

struct WeightedRow {
  const void* data = nullptr;
  float weight = 0;
};

// out = the sum of the rows times their weights. Each product is added in float32 without being
// rounded, in the order of the rows, starting from zero. The sum is rounded to bf16 (NaN: 0x7fc0).
// No rows: zeros.
void combineRows(std::span<const WeightedRow> rows, size_t hidden, uint16_t* out);

// LogFMT-10 (kernels/common/logfmt.h). logfmtRowBytes() is the memory for one row. The used bytes
// depend on the row: encodeLogfmtRow() returns them, and logfmtEncodedBytes() reads them from the
// first logfmtPrefixBytes().
size_t logfmtRowBytes(size_t hidden);
size_t logfmtPrefixBytes(size_t hidden);
size_t logfmtEncodedBytes(const std::byte* row, size_t hidden);
size_t encodeLogfmtRow(const uint16_t* row, size_t hidden, std::byte* out);

// combineRows() of rows that encodeLogfmtRow() made.
void combineLogfmtRows(std::span<const WeightedRow> rows, size_t hidden, uint16_t* out);

// The functions above in the versions that this processor can run; the best one is chosen once.
enum class Isa { kPortable, kAvx2, kAvx512 };

struct RowFunctions {
  decltype(&ep::castRowToFp8) castRowToFp8;
  void (*streamRow)(void* to, const void* from, size_t bytes);
  decltype(&ep::combineRows) combineRows;
  decltype(&ep::encodeLogfmtRow) encodeLogfmtRow;
  decltype(&ep::combineLogfmtRows) combineLogfmtRows;
};

std::span<const Isa> availableIsas();  // the best one last
const char* isaName(Isa isa);
const RowFunctions& rowsOf(Isa isa);  // one of availableIsas()

}  // namespace mooncake::ep
