#include "ep/rows.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>
#include <vector>

#include "ep/row_blocks.h"

namespace mooncake::ep {
namespace {

std::vector<Isa> findIsas() {
  std::vector<Isa> isas = {Isa::kPortable};
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) isas.push_back(Isa::kAvx2);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    isas.push_back(Isa::kAvx512);
#endif
  return isas;
}

const RowFunctions& best() {
  static const RowFunctions& functions = rowsOf(availableIsas().back());
  return functions;
}

}  // namespace

std::span<const Isa> availableIsas() {
  static const std::vector<Isa> isas = findIsas();
  return isas;
}

const char* isaName(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "?";
}

const RowFunctions& rowsOf([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return kAvx2Rows;
  if (isa == Isa::kAvx512) return kAvx512Rows;
#endif
  return kPortableRows;
}

void castRowToFp8(const uint16_t* row, size_t hidden, bool roundScale, uint8_t* out,
                  float* scales) {
  best().castRowToFp8(row, hidden, roundScale, out, scales);
}

void packUe8m0(const float* scales, size_t count, int32_t* packed) {
  for (size_t i = 0; i < count; i += 4) {
    uint32_t word = 0;
    for (size_t j = i; j < count && j < i + 4; ++j)
      word |= uint32_t(ue8m0Of(scales[j])) << (8 * (j - i));
    packed[i / 4] = int32_t(word);
  }
}

// A rank that is alone gets half: the kernel and its own threads use the cache, too.
size_t shareOfCache(const CpuCache& cache, size_t cores, int ranks) {
  const size_t own = cache.cores == 0 ? cores : std::min(cache.cores, cores);
  const size_t around = (size_t(std::max(ranks, 1)) * own + cores - 1) / cores;
  return cache.bytes / std::max<size_t>(around, 2);
}

CopyHint copyHint(size_t bytes, int ranks) {
  static const CpuCache cache = lastCache();
  static const auto cores = size_t(std::max(::sysconf(_SC_NPROCESSORS_ONLN), 1L));
  return 2 * bytes < shareOfCache(cache, cores, ranks) ? CopyHint::kCached : CopyHint::kStreamed;
}

CopyHint copyHintForPeers(size_t bytes, int ranks) {
  constexpr size_t kInTheirCaches = 256 << 10;
  return bytes <= kInTheirCaches ? CopyHint::kStreamed : copyHint(bytes, ranks);
}

void copyRow(void* to, const void* from, size_t bytes, CopyHint hint) {
  if (hint == CopyHint::kStreamed)
    best().streamRow(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
}

void combineRows(std::span<const WeightedRow> rows, size_t hidden, uint16_t* out) {
  best().combineRows(rows, hidden, out);
}

size_t encodeLogfmtRow(const uint16_t* row, size_t hidden, std::byte* out) {
  return best().encodeLogfmtRow(row, hidden, out);
}

void combineLogfmtRows(std::span<const WeightedRow> rows, size_t hidden, uint16_t* out) {
  best().combineLogfmtRows(rows, hidden, out);
}

}  // namespace mooncake::ep
