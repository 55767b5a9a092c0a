#pragma once

#include <chrono>
#include <cstdint>
#include <random>
#include <vector>

namespace mooncake {

// What becomes of all that a simulated wire carries. The same seed decides the same, call by call.
class SimDice {
 public:
  explicit SimDice(uint64_t seed) : random_(seed) {}

  // How long something is held up. Mostly not at all.
  static constexpr std::chrono::microseconds kMostDelay{1000};
  std::chrono::microseconds delay();

  // What a transfer is cut into, in the order in which the pieces leave. Of nothing: an empty one.
  static constexpr uint64_t kMostPiece = uint64_t(60) << 10;
  struct Piece {
    uint64_t position = 0;
    uint64_t bytes = 0;
    std::chrono::microseconds delay{0};
    bool operator==(const Piece&) const = default;
  };
  std::vector<Piece> cut(uint64_t bytes);

  // Once in so many times; 0: never.
  bool breaks(uint32_t odds) { return odds != 0 && below(odds) == 0; }

 private:
  uint64_t below(uint64_t end) { return random_() % end; }

  std::mt19937_64 random_;
};

}  // namespace mooncake
