/* The loop that a combine is compared with: bf16 rows times weights, added up in float32. bench_ep.py compiles
   it for the machine that it runs on. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static float widened(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

static uint16_t rounded(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* rows[tokens][k] of `hidden` channels; out[tokens][hidden] */
void fused_sum(const uint16_t *const *rows, const float *weights, size_t tokens, size_t k,
               size_t hidden, uint16_t *out) {
  enum { kBlock = 256 };
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t begin = 0; begin < hidden; begin += kBlock) {
      size_t length = hidden - begin < kBlock ? hidden - begin : kBlock;
      float sum[kBlock] = {0};
      for (size_t j = 0; j < k; ++j) {
        const uint16_t *row = rows[t * k + j] + begin;
        float weight = weights[t * k + j];
        for (size_t i = 0; i < length; ++i) sum[i] += widened(row[i]) * weight;
      }
      for (size_t i = 0; i < length; ++i) out[t * hidden + begin + i] = rounded(sum[i]);
    }
  }
}
