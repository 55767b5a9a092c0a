#pragma once

#include <cstdint>
#include <initializer_list>

namespace mooncake {

// A hash of numbers that must be equal on all ranks; see kernels::Exchange::call.
inline uint32_t callHash(std::initializer_list<uint64_t> numbers, uint32_t before = 2166136261u) {
  uint32_t hash = before;
  for (const uint64_t number : numbers) {
    for (int shift = 0; shift < 64; shift += 8)
      hash = (hash ^ uint8_t(number >> shift)) * 16777619u;
  }
  return hash;
}

}  // namespace mooncake
