#pragma once

#include "kernels/copy.cuh"
#include "kernels/copy_rows.h"

namespace mooncake::kernels {

struct RowCounts {
  uint32_t of[kCountsAtOnce];
};

// The counts lie in memory of the host, so all threads fetch them at once.
MC_DEVICE void copyUsedRows(const CopyRowsArguments& a) {
  constexpr size_t kChunk = 16 << 10;
  MC_SHARED(RowCounts, counts);
  const uint32_t groups = a.blocks / a.blocksEach;
  for (uint32_t first = 0; first < groups; first += kCountsAtOnce) {
    const uint32_t left = groups - first;
    const uint32_t here = left < kCountsAtOnce ? left : kCountsAtOnce;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < here; i += blockDim.x) {
      const int32_t count = a.counts[first + i];
      counts.of[i] = count < 0 ? 0 : uint32_t(count) < a.rows ? uint32_t(count) : a.rows;
    }
    __syncthreads();
    for (uint32_t i = 0; i < here * a.blocksEach; ++i) {
      const size_t block = size_t(first) * a.blocksEach + i;
      const size_t begin = block * a.rows * a.rowBytes;
      const size_t bytes = counts.of[i / a.blocksEach] * a.rowBytes;
      // Short blocks begin at different blocks of the grid.
      const size_t turn = (blockIdx.x + gridDim.x - block % gridDim.x) % gridDim.x;
      for (size_t at = turn * kChunk; at < bytes; at += gridDim.x * kChunk) {
        const size_t chunk = bytes - at < kChunk ? bytes - at : kChunk;
        copyBytes(a.to + begin + at, a.from + begin + at, chunk);
      }
    }
  }
}

}  // namespace mooncake::kernels

extern "C" __global__ void __launch_bounds__(512, 1)
    mooncake_copy_rows(const __grid_constant__ mooncake::kernels::CopyRowsArguments arguments) {
  mooncake::kernels::copyUsedRows(arguments);
}
