#pragma once

#include <chrono>

namespace probe {

using Clock = std::chrono::steady_clock;

inline double millisecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

}  // namespace probe
