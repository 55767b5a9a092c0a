#pragma once

#include "kernels/device.h"

// Work that the 32 threads of a warp do together.
namespace mooncake::kernels {

constexpr unsigned kLanes = 32, kAllLanes = 0xffffffffu;

// Number of this warp among all of the kernel's, for the part of `block`, and their number.
MC_DEVICE unsigned warpOf(unsigned block) {
  return block * (blockDim.x / kLanes) + threadIdx.x / kLanes;
}
MC_DEVICE unsigned warps() { return gridDim.x * (blockDim.x / kLanes); }
// The warps take turns with items: the first item for this warp, where `before` items of other
// groups had their turns.
MC_DEVICE size_t firstItem(unsigned block, size_t before) {
  return (warpOf(block) + warps() - before % warps()) % warps();
}

MC_DEVICE unsigned lanesBelow() { return (1u << lane()) - 1; }

// The sum of the values of all lanes up to this one.
MC_DEVICE unsigned sumUpTo(unsigned value) {
  for (unsigned step = 1; step < kLanes; step *= 2) {
    const unsigned below = __shfl_sync(kAllLanes, value, int((lane() - step) % kLanes));
    if (lane() >= step) value += below;
  }
  return value;
}

// The value of the first lane.
MC_DEVICE unsigned ofFirstLane(unsigned value) { return __shfl_sync(kAllLanes, value, 0); }

template <typename T, typename Combine>
MC_DEVICE T combineLanes(T value, const Combine& combine) {
  for (int step = kLanes / 2; step > 0; step /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Several loads are on their way at a time.
template <typename Unit>
MC_DEVICE void copyUnitsByWarp(unsigned char* to, const unsigned char* from, size_t bytes) {
  constexpr unsigned kAtOnce = 4;
  Unit* const target = reinterpret_cast<Unit*>(to);
  const Unit* const source = reinterpret_cast<const Unit*>(from);
  const size_t units = bytes / sizeof(Unit);
  size_t i = lane();
  for (; i + (kAtOnce - 1) * kLanes < units; i += kAtOnce * kLanes) {
    Unit some[kAtOnce];
    for (unsigned k = 0; k < kAtOnce; ++k) some[k] = loadUnit(source + i + k * kLanes);
    for (unsigned k = 0; k < kAtOnce; ++k) storeUnit(target + i + k * kLanes, some[k]);
  }
  for (; i < units; i += kLanes) storeUnit(target + i, loadUnit(source + i));
}

// Copies in the largest units that both addresses allow.
MC_DEVICE void copyByWarp(unsigned char* to, const unsigned char* from, size_t bytes) {
  const size_t address = reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from);
  size_t unit = 1;
  if (address % sizeof(uint4) == 0) {
    unit = sizeof(uint4);
    copyUnitsByWarp<uint4>(to, from, bytes);
  } else if (address % sizeof(uint16_t) == 0) {
    unit = sizeof(uint16_t);
    copyUnitsByWarp<uint16_t>(to, from, bytes);
  }
  const size_t copied = unit == 1 ? 0 : bytes / unit * unit;
  copyUnitsByWarp<unsigned char>(to + copied, from + copied, bytes - copied);
}

}  // namespace mooncake::kernels
