#if defined(__x86_64__)
#include <algorithm>
#include <cstring>
#include <immintrin.h>

#include "ep/row_blocks.h"

// An attribute, not a compiler flag for the file: inline functions of headers stay runnable on
// every processor, even if the linker keeps the copy of this file.
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define AVX512_INLINE AVX512 __attribute__((always_inline)) inline

namespace mooncake::ep {
namespace {

// Splits a vector of 32 bf16 channels into two of 16 floats: the even and the odd ones. Their bits
// stand in the right place, and results go back likewise, so no lane moves.
AVX512_INLINE __m512 evenFloats(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

AVX512_INLINE __m512i upperHalves(__m512i pairs) {
  return _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)));
}

AVX512_INLINE __m512 oddFloats(__m512i pairs) { return _mm512_castsi512_ps(upperHalves(pairs)); }

AVX512_INLINE __m512i magnitudes(__m512i values) {
  return _mm512_and_si512(values, _mm512_set1_epi16(0x7fff));
}

AVX512_INLINE uint16_t leastOf(__m512i values) {
  const __m256i half =
      _mm256_min_epu16(_mm512_castsi512_si256(values), _mm512_extracti64x4_epi64(values, 1));
  const __m128i quarter =
      _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return uint16_t(_mm_cvtsi128_si32(_mm_minpos_epu16(quarter)));
}

AVX512_INLINE uint16_t greatestOf(__m512i values) {
  return uint16_t(~leastOf(_mm512_xor_si512(values, _mm512_set1_epi32(-1))));
}

// floatToE4m3() of 32 finite floats that do not round to more than 448. Each float is added to one
// so large that its last place counts the FP8 steps around the value. The last places of the sum
// are then the value in such steps, rounded.
AVX512_INLINE __m256i e4m3Of(__m512 even, __m512 odd) {
  constexpr int kLeastExponent = 0x3c80;  // 2^-6, as bf16: below it, steps get no smaller
  constexpr int kCounter = (kLeastExponent << 16) + (20 << 23) + 0x400000;
  constexpr uint32_t kOdd = 0xaaaaaaaa;
  const __m512i halves = _mm512_mask_mov_epi16(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                               kOdd, _mm512_castps_si512(odd));
  const __m512i exponents = _mm512_subs_epu16(_mm512_and_si512(halves, _mm512_set1_epi16(0x7f80)),
                                              _mm512_set1_epi16(kLeastExponent));
  const __m512i counter = _mm512_set1_epi32(kCounter);
  const __m512 evenSum = _mm512_add_ps(
      even, _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(exponents, 16), counter)));
  const __m512 oddSum =
      _mm512_add_ps(odd, _mm512_castsi512_ps(_mm512_add_epi32(upperHalves(exponents), counter)));
  const __m512i steps = _mm512_mask_mov_epi16(_mm512_castps_si512(evenSum), kOdd,
                                              _mm512_slli_epi32(_mm512_castps_si512(oddSum), 16));
  const __m512i code = _mm512_add_epi16(_mm512_abs_epi16(steps), _mm512_srli_epi16(exponents, 4));
  // code | (sign & 0x80)
  return _mm512_cvtepi16_epi8(
      _mm512_ternarylogic_epi32(code, _mm512_srli_epi16(halves, 8), _mm512_set1_epi16(0x80), 0xf8));
}

AVX512 void castRow(const uint16_t* row, size_t hidden, bool roundScale, uint8_t* out,
                    float* scales) {
  // Scales first, for several blocks at once: the way from a block's channels to its scale is long.
  constexpr size_t kBlocks = 8;
  while (hidden >= kBlock) {
    const size_t blocks = std::min(hidden / kBlock, kBlocks);
    uint16_t amax[kBlocks];
    float inverse[kBlocks];
    for (size_t b = 0; b < blocks; ++b) {
      __m512i largest = _mm512_setzero_si512();
      for (size_t i = b * kBlock; i < (b + 1) * kBlock; i += 32)
        largest = _mm512_max_epu16(largest, magnitudes(_mm512_loadu_si512(row + i)));
      amax[b] = greatestOf(largest);
      const Fp8Scale scale = fp8Scale(bf16ToFloat(amax[b]), roundScale);
      scales[b] = scale.scale;
      inverse[b] = scale.inverse;
    }
    for (size_t b = 0; b < blocks; ++b) {
      const __m512 factor = _mm512_set1_ps(inverse[b]);
      for (size_t i = b * kBlock; i < (b + 1) * kBlock; i += 32) {
        const __m512i pairs = _mm512_loadu_si512(row + i);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                            e4m3Of(_mm512_mul_ps(evenFloats(pairs), factor),
                                   _mm512_mul_ps(oddFloats(pairs), factor)));
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

AVX512 void streamRow(void* to, const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(target) % kLine);
  std::memcpy(target, source, head);
  size_t done = head;
  for (; done + kLine <= bytes; done += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + done),
                        _mm512_loadu_si512(source + done));
  std::memcpy(target + done, source + done, bytes - done);
  _mm_sfence();
}

// Rounds to bf16, in the upper half of each word; the lower half is not cleared.
AVX512_INLINE __m512i bf16Of(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(kBf16Nan << 16));
}

AVX512_INLINE __m512i bf16Pairs(__m512 even, __m512 odd) {
  return _mm512_mask_mov_epi16(_mm512_srli_epi32(bf16Of(even), 16), 0xaaaaaaaa, bf16Of(odd));
}

// Nothing is prefetched: processors follow eight rows by themselves, and hints made it slower.
AVX512 void combine(std::span<const WeightedRow> rows, size_t hidden, uint16_t* out) {
  size_t begin = 0;
  for (; begin + kBlock <= hidden; begin += kBlock) {
    __m512 even[4], odd[4];
    for (int i = 0; i < 4; ++i) even[i] = odd[i] = _mm512_setzero_ps();
    for (const WeightedRow& row : rows) {
      const uint16_t* values = static_cast<const uint16_t*>(row.data) + begin;
      const __m512 weight = _mm512_set1_ps(row.weight);
      for (int i = 0; i < 4; ++i) {
        const __m512i pairs = _mm512_loadu_si512(values + 32 * i);
        even[i] = _mm512_fmadd_ps(evenFloats(pairs), weight, even[i]);
        odd[i] = _mm512_fmadd_ps(oddFloats(pairs), weight, odd[i]);
      }
    }
    for (int i = 0; i < 4; ++i)
      _mm512_storeu_si512(out + begin + 32 * i, bf16Pairs(even[i], odd[i]));
  }
  combineChannels(rows, begin, hidden, out);
}

AVX512 LogfmtHeader headerOf(const uint16_t* block) {
  __m512i largest = _mm512_setzero_si512();
  __m512i smallest = _mm512_set1_epi32(-1);  // minus one: zero comes last
  for (size_t i = 0; i < kBlock; i += 32) {
    const __m512i magnitude = magnitudes(_mm512_loadu_si512(block + i));
    largest = _mm512_max_epu16(largest, magnitude);
    smallest = _mm512_min_epu16(smallest, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));
  }
  return logfmtHeader(greatestOf(largest), uint16_t(leastOf(smallest) + 1));
}

// negativePower()
AVX512_INLINE __m512 powerOf(__m512i t) {
  const __m512 f =
      _mm512_cvtepi32_ps(_mm512_and_si512(t, _mm512_set1_epi32((1 << kLogfmtUnitBits) - 1)));
  __m512 power = _mm512_fmadd_ps(_mm512_set1_ps(kPowerC), f, _mm512_set1_ps(kPowerB));
  power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(kPowerA));
  power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(1.0f));
  const __m512i octaves = _mm512_slli_epi32(_mm512_srli_epi32(t, kLogfmtUnitBits), 23);
  return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(power), octaves));
}

// log2Of()
AVX512_INLINE __m512 logOf(__m512i magnitude) {
  const __m512 x =
      _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_and_si512(magnitude, _mm512_set1_epi32(0x7f))),
                    _mm512_set1_ps(0x1p-7f));
  __m512 slope = _mm512_fmadd_ps(_mm512_set1_ps(kLogD), x, _mm512_set1_ps(kLogC));
  slope = _mm512_fmadd_ps(slope, x, _mm512_set1_ps(kLogB));
  slope = _mm512_fmadd_ps(slope, x, _mm512_set1_ps(kLogA));
  return _mm512_fmadd_ps(slope, x, _mm512_cvtepi32_ps(_mm512_srli_epi32(magnitude, 7)));
}

// logfmtCode()
AVX512 void encodeBlock(const uint16_t* block, LogfmtHeader header, std::byte* out) {
  const __m512 largest = _mm512_set1_ps(bf16ToFloat(header.largest));
  const __m512 largestLog = _mm512_set1_ps(log2Of(header.largest));
  const __m512 stepsPerOctave = _mm512_set1_ps(quotient(kLogfmtUnits, float(header.step)));
  const __m512i step = _mm512_set1_epi32(header.step);
  const __m512i mostSkipped = _mm512_set1_epi32(kLogfmtLargestCode - 1);
  for (size_t i = 0; i < kBlock; i += 16) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + i));
    const __m512i magnitude =
        _mm512_and_si512(_mm512_cvtepu16_epi32(values), _mm512_set1_epi32(0x7fff));
    const __m512 below = _mm512_mul_ps(_mm512_sub_ps(largestLog, logOf(magnitude)), stepsPerOctave);
    const __m512i skipped = _mm512_min_epi32(_mm512_cvttps_epi32(below), mostSkipped);
    const __m512i t = _mm512_madd_epi16(skipped, step);
    const __m512 upper = _mm512_mul_ps(largest, powerOf(t));
    const __mmask16 aboveZero = _mm512_cmplt_epi32_mask(skipped, mostSkipped);
    const __m512 lower =
        _mm512_maskz_mul_ps(aboveZero, largest, powerOf(_mm512_add_epi32(t, step)));
    const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 16));
    const __mmask16 down =
        _mm512_cmp_ps_mask(_mm512_sub_ps(value, lower), _mm512_sub_ps(upper, value), _CMP_LE_OQ);
    __m512i code = _mm512_sub_epi32(_mm512_set1_epi32(kLogfmtLargestCode), skipped);
    code = _mm512_mask_sub_epi32(code, down, code, _mm512_set1_epi32(1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(code));
    const uint16_t ninth = _mm512_test_epi32_mask(code, _mm512_set1_epi32(256));
    const uint16_t sign = _mm256_movepi16_mask(values);
    std::memcpy(out + kLogfmtNinthBits + i / 8, &ninth, sizeof(ninth));
    std::memcpy(out + kLogfmtSigns + i / 8, &sign, sizeof(sign));
  }
}

AVX512 void addCodedBlock(const std::byte* block, LogfmtHeader header, float weight, float* sums) {
  const __m512 largest = _mm512_set1_ps(bf16ToFloat(header.largest));
  const __m512i step = _mm512_set1_epi32(header.step);
  const __m512i signBit = _mm512_set1_epi32(int(0x80000000));
  const __m512 weights = _mm512_set1_ps(weight);
  for (size_t i = 0; i < kBlock; i += 16) {
    uint16_t ninth, sign;
    std::memcpy(&ninth, block + kLogfmtNinthBits + i / 8, sizeof(ninth));
    std::memcpy(&sign, block + kLogfmtSigns + i / 8, sizeof(sign));
    __m512i code =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + i)));
    code = _mm512_mask_or_epi32(code, ninth, code, _mm512_set1_epi32(256));
    const __m512i skipped = _mm512_sub_epi32(_mm512_set1_epi32(kLogfmtLargestCode), code);
    const __mmask16 aboveZero = _mm512_test_epi32_mask(code, code);
    const __m512 magnitude =
        _mm512_maskz_mul_ps(aboveZero, largest, powerOf(_mm512_madd_epi16(skipped, step)));
    const __m512i bits = _mm512_castps_si512(magnitude);
    const __m512 value = _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, sign, bits, signBit));
    _mm512_storeu_ps(sums + i, _mm512_fmadd_ps(value, weights, _mm512_loadu_ps(sums + i)));
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

const RowFunctions kAvx512Rows{castRow, streamRow, combine, encode, combineLogfmt};

}  // namespace mooncake::ep
#endif
