#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>

// Helpers of sweeps: a case is drawn from its seed, and settings are read from the environment.
namespace mooncake::test {

// Returns the number in the text, or `otherwise` without a text.
inline uint64_t numberIn(const char* text, uint64_t otherwise) {
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Returns a number that looks random and follows from `x`.
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Random choices that follow from a seed alone.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int below(int end) { return static_cast<int>(random_() % static_cast<uint64_t>(end)); }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T, size_t N>
  const T& oneOf(const T (&all)[N]) {
    return all[below(static_cast<int>(N))];
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace mooncake::test
