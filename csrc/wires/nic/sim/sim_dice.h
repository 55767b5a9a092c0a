#pragma once

#include <chrono>
#include <cstdint>
#include <random>

namespace mooncake {

// Decides the faults and delays of simulated cards and connections. The same seed gives the same
// decisions, call by call.
class SimDice {
 public:
  explicit SimDice(uint64_t seed) : random_(seed) {}

  // Returns how long a message or completion is delayed; mostly not at all.
  static constexpr std::chrono::microseconds kMostDelay{1000};
  std::chrono::microseconds delay() {
    const uint64_t how = below(10);
    if (how < 6) return {};
    return std::chrono::microseconds(below(how < 9 ? 200 : kMostDelay.count()));
  }
  // Returns true once in `in` calls; 0: never.
  bool once(uint32_t in) { return in != 0 && below(in) == 0; }
  uint64_t below(uint64_t end) { return random_() % end; }

 private:
  std::mt19937_64 random_;
};

}  // namespace mooncake
