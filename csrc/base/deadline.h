#pragma once

#include <chrono>

namespace mooncake {

using Clock = std::chrono::steady_clock;

// The point in time at which a wait gives up. Every wait has one.
class Deadline {
 public:
  // Takes a budget of any unit. It is compared in its own unit, because an "endless" number of
  // milliseconds overflows as nanoseconds.
  template <typename Rep, typename Period>
  static Deadline after(std::chrono::duration<Rep, Period> budget) {
    using Budget = std::chrono::duration<Rep, Period>;
    const auto now = Clock::now();
    if (budget <= Budget::zero()) return Deadline(now, now);
    if (budget >= std::chrono::duration_cast<Budget>(Clock::time_point::max() - now))
      return Deadline(Clock::time_point::max(), now);
    return Deadline(now + std::chrono::duration_cast<Clock::duration>(budget), now);
  }
  static Deadline at(Clock::time_point when) { return Deadline(when, Clock::time_point::min()); }

  bool passed() const { return Clock::now() >= when_; }
  std::chrono::nanoseconds left() const {
    const auto now = Clock::now();
    return when_ > now ? when_ - now : std::chrono::nanoseconds(0);
  }
  Clock::time_point when() const { return when_; }
  // When the budget began; time_point::min() for a deadline made by at().
  Clock::time_point began() const { return began_; }
  Deadline earlier(Deadline other) const { return other.when_ < when_ ? other : *this; }

 private:
  Deadline(Clock::time_point when, Clock::time_point began) : when_(when), began_(began) {}
  Clock::time_point when_;
  Clock::time_point began_;
};

}  // namespace mooncake
