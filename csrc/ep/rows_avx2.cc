#if defined(__x86_64__)
#include <algorithm>
#include <cstring>
#include <immintrin.h>

#include "ep/row_blocks.h"

// An attribute, not a compiler flag for the file: inline functions of headers stay runnable on
// every processor, even if the linker keeps the copy of this file.
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE AVX2 __attribute__((always_inline)) inline

namespace mooncake::ep {
namespace {

AVX2_INLINE __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

AVX2_INLINE void store(void* to, __m256i values) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), values);
}

// Splits a vector of 16 bf16 channels into two of 8 floats: the even and the odd ones. Their bits
// stand in the right place, and results go back likewise, so no lane moves.
AVX2_INLINE __m256 evenFloats(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

AVX2_INLINE __m256i upperHalves(__m256i pairs) {
  return _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000)));
}

AVX2_INLINE __m256 oddFloats(__m256i pairs) { return _mm256_castsi256_ps(upperHalves(pairs)); }

AVX2_INLINE __m256i magnitudes(__m256i values) {
  return _mm256_and_si256(values, _mm256_set1_epi16(0x7fff));
}

AVX2_INLINE uint16_t leastOf(__m256i values) {
  const __m128i half =
      _mm_min_epu16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  return uint16_t(_mm_cvtsi128_si32(_mm_minpos_epu16(half)));
}

AVX2_INLINE uint16_t greatestOf(__m256i values) {
  return uint16_t(~leastOf(_mm256_xor_si256(values, _mm256_set1_epi32(-1))));
}

// floatToE4m3() of 16 finite floats that do not round to more than 448, each code in half a word.
// Each float is added to one so large that its last place counts the FP8 steps around the value.
// The last places of the sum are then the value in such steps, rounded.
AVX2_INLINE __m256i e4m3Of(__m256 even, __m256 odd) {
  constexpr int kLeastExponent = 0x3c80;  // 2^-6, as bf16: below it, steps get no smaller
  constexpr int kCounter = (kLeastExponent << 16) + (20 << 23) + 0x400000;
  const __m256i halves = _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16),
                                            _mm256_castps_si256(odd), 0xaa);
  const __m256i exponents = _mm256_subs_epu16(_mm256_and_si256(halves, _mm256_set1_epi16(0x7f80)),
                                              _mm256_set1_epi16(kLeastExponent));
  const __m256i counter = _mm256_set1_epi32(kCounter);
  const __m256 evenSum = _mm256_add_ps(
      even, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(exponents, 16), counter)));
  const __m256 oddSum =
      _mm256_add_ps(odd, _mm256_castsi256_ps(_mm256_add_epi32(upperHalves(exponents), counter)));
  const __m256i steps = _mm256_blend_epi16(
      _mm256_castps_si256(evenSum), _mm256_slli_epi32(_mm256_castps_si256(oddSum), 16), 0xaa);
  const __m256i code = _mm256_add_epi16(_mm256_abs_epi16(steps), _mm256_srli_epi16(exponents, 4));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(halves, 8), _mm256_set1_epi16(0x80));
  return _mm256_or_si256(code, sign);
}

AVX2_INLINE __m256i e4m3At(const uint16_t* values, __m256 factor) {
  const __m256i pairs = load(values);
  return e4m3Of(_mm256_mul_ps(evenFloats(pairs), factor), _mm256_mul_ps(oddFloats(pairs), factor));
}

AVX2 void castRow(const uint16_t* row, size_t hidden, bool roundScale, uint8_t* out,
                  float* scales) {
  // Scales first, for several blocks at once: the way from a block's channels to its scale is long.
  constexpr size_t kBlocks = 8;
  while (hidden >= kBlock) {
    const size_t blocks = std::min(hidden / kBlock, kBlocks);
    uint16_t amax[kBlocks];
    float inverse[kBlocks];
    for (size_t b = 0; b < blocks; ++b) {
      __m256i largest = _mm256_setzero_si256();
      for (size_t i = b * kBlock; i < (b + 1) * kBlock; i += 16)
        largest = _mm256_max_epu16(largest, magnitudes(load(row + i)));
      amax[b] = greatestOf(largest);
      const Fp8Scale scale = fp8Scale(bf16ToFloat(amax[b]), roundScale);
      scales[b] = scale.scale;
      inverse[b] = scale.inverse;
    }
    for (size_t b = 0; b < blocks; ++b) {
      const __m256 factor = _mm256_set1_ps(inverse[b]);
      for (size_t i = b * kBlock; i < (b + 1) * kBlock; i += 32) {
        // Packing works on halves of the vectors: the quarters come as 0 2 1 3.
        const __m256i packed =
            _mm256_packus_epi16(e4m3At(row + i, factor), e4m3At(row + i + 16, factor));
        store(out + i, _mm256_permute4x64_epi64(packed, 0xd8));
      }
    }
    for (size_t b = 0; b < blocks; ++b)
      if (amax[b] >= kBf16Infinity)
        castBlockToFp8(row + b * kBlock, kBlock, roundScale, out + b * kBlock, scales + b);
    hidden -= blocks * kBlock;
    row += blocks * kBlock;
    out += blocks * kBlock;
    scales += blocks;
  }
  if (hidden > 0) castBlockToFp8(row, hidden, roundScale, out, scales);
}

AVX2 void streamRow(void* to, const void* from, size_t bytes) {
  constexpr size_t kVector = 32;
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(target) % kVector);
  std::memcpy(target, source, head);
  size_t done = head;
  for (; done + kVector <= bytes; done += kVector)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + done), load(source + done));
  std::memcpy(target + done, source + done, bytes - done);
  _mm_sfence();
}

// Rounds to bf16, in the upper half of each word; the lower half is not cleared.
AVX2_INLINE __m256i bf16Of(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256 nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(kBf16Nan << 16), _mm256_castps_si256(nan));
}

AVX2_INLINE __m256i bf16Pairs(__m256 even, __m256 odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(bf16Of(even), 16), bf16Of(odd), 0xaa);
}

// Nothing is prefetched: processors follow eight rows by themselves, and hints made it slower.
AVX2 void combine(std::span<const WeightedRow> rows, size_t hidden, uint16_t* out) {
  constexpr size_t kChannels = 64;  // their sums are eight of the sixteen registers
  size_t begin = 0;
  for (; begin + kChannels <= hidden; begin += kChannels) {
    __m256 even[4], odd[4];
    for (int i = 0; i < 4; ++i) even[i] = odd[i] = _mm256_setzero_ps();
    for (const WeightedRow& row : rows) {
      const uint16_t* values = static_cast<const uint16_t*>(row.data) + begin;
      const __m256 weight = _mm256_set1_ps(row.weight);
      for (int i = 0; i < 4; ++i) {
        const __m256i pairs = load(values + 16 * i);
        even[i] = _mm256_fmadd_ps(evenFloats(pairs), weight, even[i]);
        odd[i] = _mm256_fmadd_ps(oddFloats(pairs), weight, odd[i]);
      }
    }
    for (int i = 0; i < 4; ++i) store(out + begin + 16 * i, bf16Pairs(even[i], odd[i]));
  }
  combineChannels(rows, begin, hidden, out);
}

AVX2 LogfmtHeader headerOf(const uint16_t* block) {
  __m256i largest = _mm256_setzero_si256();
  __m256i smallest = _mm256_set1_epi32(-1);  // minus one: zero comes last
  for (size_t i = 0; i < kBlock; i += 16) {
    const __m256i magnitude = magnitudes(load(block + i));
    largest = _mm256_max_epu16(largest, magnitude);
    smallest = _mm256_min_epu16(smallest, _mm256_sub_epi16(magnitude, _mm256_set1_epi16(1)));
  }
  return logfmtHeader(greatestOf(largest), uint16_t(leastOf(smallest) + 1));
}

// negativePower()
AVX2_INLINE __m256 powerOf(__m256i t) {
  const __m256 f =
      _mm256_cvtepi32_ps(_mm256_and_si256(t, _mm256_set1_epi32((1 << kLogfmtUnitBits) - 1)));
  __m256 power = _mm256_fmadd_ps(_mm256_set1_ps(kPowerC), f, _mm256_set1_ps(kPowerB));
  power = _mm256_fmadd_ps(power, f, _mm256_set1_ps(kPowerA));
  power = _mm256_fmadd_ps(power, f, _mm256_set1_ps(1.0f));
  const __m256i octaves = _mm256_slli_epi32(_mm256_srli_epi32(t, kLogfmtUnitBits), 23);
  return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_castps_si256(power), octaves));
}

// log2Of()
AVX2_INLINE __m256 logOf(__m256i magnitude) {
  const __m256 x =
      _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_and_si256(magnitude, _mm256_set1_epi32(0x7f))),
                    _mm256_set1_ps(0x1p-7f));
  __m256 slope = _mm256_fmadd_ps(_mm256_set1_ps(kLogD), x, _mm256_set1_ps(kLogC));
  slope = _mm256_fmadd_ps(slope, x, _mm256_set1_ps(kLogB));
  slope = _mm256_fmadd_ps(slope, x, _mm256_set1_ps(kLogA));
  return _mm256_fmadd_ps(slope, x, _mm256_cvtepi32_ps(_mm256_srli_epi32(magnitude, 7)));
}

AVX2_INLINE std::byte topBits(__m256i words) {
  return std::byte(_mm256_movemask_ps(_mm256_castsi256_ps(words)));
}

// logfmtCode()
AVX2 void encodeBlock(const uint16_t* block, LogfmtHeader header, std::byte* out) {
  const __m256 largest = _mm256_set1_ps(bf16ToFloat(header.largest));
  const __m256 largestLog = _mm256_set1_ps(log2Of(header.largest));
  const __m256 stepsPerOctave = _mm256_set1_ps(quotient(kLogfmtUnits, float(header.step)));
  const __m256i step = _mm256_set1_epi32(header.step);
  const __m256i mostSkipped = _mm256_set1_epi32(kLogfmtLargestCode - 1);
  // The lowest byte of each word, then the bytes of both halves side by side.
  const __m256i lowBytes = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m256i halves = _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1);
  for (size_t i = 0; i < kBlock; i += 8) {
    const __m256i values =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + i)));
    const __m256i magnitude = _mm256_and_si256(values, _mm256_set1_epi32(0x7fff));
    const __m256 below = _mm256_mul_ps(_mm256_sub_ps(largestLog, logOf(magnitude)), stepsPerOctave);
    const __m256i skipped = _mm256_min_epi32(_mm256_cvttps_epi32(below), mostSkipped);
    const __m256i t = _mm256_madd_epi16(skipped, step);
    const __m256 upper = _mm256_mul_ps(largest, powerOf(t));
    const __m256i aboveZero = _mm256_cmpgt_epi32(mostSkipped, skipped);
    const __m256 lower = _mm256_and_ps(_mm256_castsi256_ps(aboveZero),
                                       _mm256_mul_ps(largest, powerOf(_mm256_add_epi32(t, step))));
    const __m256 value = _mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 16));
    const __m256 down =
        _mm256_cmp_ps(_mm256_sub_ps(value, lower), _mm256_sub_ps(upper, value), _CMP_LE_OQ);
    // True is -1.
    const __m256i code =
        _mm256_add_epi32(_mm256_sub_epi32(_mm256_set1_epi32(kLogfmtLargestCode), skipped),
                         _mm256_castps_si256(down));
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(code, lowBytes), halves);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm256_castsi256_si128(bytes));
    out[kLogfmtNinthBits + i / 8] = topBits(_mm256_slli_epi32(code, 31 - 8));
    out[kLogfmtSigns + i / 8] = topBits(_mm256_slli_epi32(values, 16));
  }
}

// Sets all bits of word i if bit i is set.
AVX2_INLINE __m256i spread(std::byte bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(std::to_integer<int>(bits));
  return _mm256_cmpeq_epi32(_mm256_and_si256(all, each), each);
}

AVX2 void addCodedBlock(const std::byte* block, LogfmtHeader header, float weight, float* sums) {
  const __m256 largest = _mm256_set1_ps(bf16ToFloat(header.largest));
  const __m256i step = _mm256_set1_epi32(header.step);
  const __m256 weights = _mm256_set1_ps(weight);
  for (size_t i = 0; i < kBlock; i += 8) {
    const __m256i ninth =
        _mm256_and_si256(spread(block[kLogfmtNinthBits + i / 8]), _mm256_set1_epi32(256));
    const __m256i sign =
        _mm256_and_si256(spread(block[kLogfmtSigns + i / 8]), _mm256_set1_epi32(int(0x80000000)));
    const __m256i low =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(block + i)));
    const __m256i code = _mm256_or_si256(low, ninth);
    const __m256i skipped = _mm256_sub_epi32(_mm256_set1_epi32(kLogfmtLargestCode), code);
    const __m256i isZero = _mm256_cmpeq_epi32(code, _mm256_setzero_si256());
    const __m256 magnitude =
        _mm256_andnot_ps(_mm256_castsi256_ps(isZero),
                         _mm256_mul_ps(largest, powerOf(_mm256_madd_epi16(skipped, step))));
    const __m256 value = _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
    _mm256_storeu_ps(sums + i, _mm256_fmadd_ps(value, weights, _mm256_loadu_ps(sums + i)));
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

const RowFunctions kAvx2Rows{castRow, streamRow, combine, encode, combineLogfmt};

}  // namespace mooncake::ep
#endif
