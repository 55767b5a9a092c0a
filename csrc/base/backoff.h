#pragma once

#include <algorithm>
#include <random>

#include "base/deadline.h"

namespace mooncake {

// Pauses between attempts that fail: each twice the last one, up to a limit, and what is waited is
// half to all of it, so that those who failed together do not come back together.
inline Clock::duration doubled(Clock::duration pause, Clock::duration most) {
  return std::min(2 * pause, most);
}
inline Clock::duration jittered(Clock::duration pause) {
  thread_local std::minstd_rand random(std::random_device{}());
  constexpr int64_t kSteps = 1024;
  return pause / 2 + pause * int64_t(random() % kSteps) / (2 * kSteps);
}

}  // namespace mooncake
