#pragma once

#include <cstdint>
#include <initializer_list>

namespace mooncake {

// FNV-1a of numbers, byte by byte, from the low one on. For numbers that must be equal on all ranks:
// it keeps out mistakes, not attackers.
constexpr uint32_t fnv1a(std::initializer_list<uint64_t> numbers, uint32_t before = 2166136261u) {
  uint32_t hash = before;
  for (const uint64_t number : numbers) {
    for (int shift = 0; shift < 64; shift += 8)
      hash = (hash ^ uint8_t(number >> shift)) * 16777619u;
  }
  return hash;
}

}  // namespace mooncake
