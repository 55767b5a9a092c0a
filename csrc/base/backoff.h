#pragma once

#include <algorithm>
#include <random>

#include "base/deadline.h"

namespace mooncake {

// Pauses between failed attempts. doubled() gives the next pause: twice the last one, at most
// `most`. jittered() draws the time to wait: half of the pause up to all of it, so that peers that
// failed together do not retry together.
inline Clock::duration doubled(Clock::duration pause, Clock::duration most) {
  return std::min(2 * pause, most);
}
inline Clock::duration jittered(Clock::duration pause) {
  thread_local std::minstd_rand random(std::random_device{}());
  constexpr int64_t kSteps = 1024;
  return pause / 2 + pause * int64_t(random() % kSteps) / (2 * kSteps);
}

}  // namespace mooncake
