#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tests/simt/calls.h"

// CUDA's own names, for kernels that a C++ compiler compiles for the CPU.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Set whenever another CUDA thread goes on.
extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 blockDim, gridDim;

// The last parameter of functions that a report is to name by their caller's line.
#define SIMT_WHERE mooncake::simt::Where where = mooncake::simt::Where::current()

inline void __syncthreads(SIMT_WHERE) { mooncake::simt::syncThreads(where); }
inline int __syncthreads_and(int vote, SIMT_WHERE) {
  return mooncake::simt::syncThreads(where, vote != 0);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_WHERE) {
  mooncake::simt::syncWarp(mask, where);
}
inline void __nanosleep(unsigned, SIMT_WHERE) { mooncake::simt::relax(where); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(unsigned(bits)) : 32; }

namespace mooncake::simt {

template <typename Chosen>
unsigned lanesWhere(unsigned mask, Chosen chosen) {
  unsigned lanes = 0;
  for (unsigned i = 0; i < 32; ++i)
    if ((mask >> i & 1) && chosen(i)) lanes |= 1u << i;
  return lanes;
}

template <typename T>
T shuffled(unsigned mask, T value, unsigned from, Where where) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const LaneValues all = exchange(WarpCall::kShuffle, mask, bits, where);
  if (!(mask >> (from & 31) & 1)) fail("a shuffle reads a lane outside its mask", where);
  T result;
  std::memcpy(&result, &all.of[from & 31], sizeof(T));
  return result;
}

}  // namespace mooncake::simt

inline unsigned __ballot_sync(unsigned mask, bool vote, SIMT_WHERE) {
  using namespace mooncake::simt;
  const LaneValues all = exchange(WarpCall::kBallot, mask, vote, where);
  return lanesWhere(mask, [&](unsigned i) { return all.of[i] != 0; });
}
inline bool __any_sync(unsigned mask, bool vote, SIMT_WHERE) {
  return __ballot_sync(mask, vote, where) != 0;
}
inline bool __all_sync(unsigned mask, bool vote, SIMT_WHERE) {
  return __ballot_sync(mask, vote, where) == mask;
}
inline unsigned __match_any_sync(unsigned mask, unsigned value, SIMT_WHERE) {
  using namespace mooncake::simt;
  const LaneValues all = exchange(WarpCall::kMatch, mask, value, where);
  return lanesWhere(mask, [&](unsigned i) { return all.of[i] == value; });
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, SIMT_WHERE) {
  using namespace mooncake::simt;
  const LaneValues all = exchange(WarpCall::kReduce, mask, value, where);
  unsigned sum = 0;
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1) sum += unsigned(all.of[i]);
  return sum;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, SIMT_WHERE) {
  const unsigned first = mooncake::simt::lane() & ~unsigned(width - 1);
  return mooncake::simt::shuffled(mask, value, first | (unsigned(from) & unsigned(width - 1)),
                                  where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SIMT_WHERE) {
  const unsigned own = mooncake::simt::lane(), other = own ^ unsigned(lanes);
  const bool isInside = other / unsigned(width) == own / unsigned(width);
  return mooncake::simt::shuffled(mask, value, isInside ? other : own, where);
}
