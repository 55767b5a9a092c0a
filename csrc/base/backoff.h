#pragma once

#include <algorithm>
#include <limits>
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

// Says when a message that is sent to many peers is sent again. Every pause is twice the last one,
// and is jittered. The message is sent again `budget` times at most.
class Repetition {
 public:
  struct Limits {
    Clock::duration first{};  // first pause
    Clock::duration most{};   // longest pause
    int budget = std::numeric_limits<int>::max();
  };

  Repetition(const Limits& limits, Clock::time_point now)
      : limits_(limits),
        pause_(std::min(limits.first, limits.most)),
        next_(now + jittered(pause_)) {}

  // Returns whether the message is due. If so, counts it and begins the next pause.
  bool takeDue(Clock::time_point now) {
    if (count_ >= limits_.budget || now < next_) return false;
    ++count_;
    pause_ = doubled(pause_, limits_.most);
    next_ = now + jittered(pause_);
    return true;
  }
  int count() const { return count_; }  // of repetitions so far
  // When the message is due next; never if the budget is spent.
  Clock::time_point next() const {
    return count_ < limits_.budget ? next_ : Clock::time_point::max();
  }

 private:
  Limits limits_;
  Clock::duration pause_;
  Clock::time_point next_;
  int count_ = 0;
};

// First pause of a repetition among many ranks: the time that a busy host needs to run each once.
inline Clock::duration pauseFor(int ranks) { return ranks * std::chrono::milliseconds(4); }

}  // namespace mooncake
