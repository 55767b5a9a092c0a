#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "base/deadline.h"

namespace mooncake {

// Breaks of a connection that tests ask for. Under the channel's lock.
class SimulatedBreaks {
 public:
  // `asks` says whether the connection is to break. Null: it never does.
  explicit SimulatedBreaks(std::function<bool()> asks) : asks_(std::move(asks)) {}

  // Begins a connection, when `lifeSigns` have come. It does not break for 50 ms, nor before the
  // engine has heard of the peer again. That is far less than a failure timeout.
  void restart(Clock::time_point now, uint64_t lifeSigns) {
    standsUntil_ = now + std::chrono::milliseconds(50);
    lifeSigns_ = lifeSigns;
  }
  // Returns whether the connection is to break now. `lifeSigns()` counts the signs that have come.
  template <typename LifeSigns>
  bool isDue(const LifeSigns& lifeSigns) const {
    return asks_ && asks_() && Clock::now() >= standsUntil_ && lifeSigns() != lifeSigns_;
  }

 private:
  const std::function<bool()> asks_;
  Clock::time_point standsUntil_;
  uint64_t lifeSigns_ = 0;
};

}  // namespace mooncake
