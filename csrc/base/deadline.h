#pragma once

#include <algorithm>
#include <chrono>

namespace mooncake {

using Clock = std::chrono::steady_clock;

// The point in time at which a wait gives up. Every wait has one.
class Deadline {
 public:
  // Of any unit: compared in its own, since what is for ever in milliseconds overflows as
  // nanoseconds.
  template <typename Rep, typename Period>
  static Deadline after(std::chrono::duration<Rep, Period> budget) {
    using Budget = std::chrono::duration<Rep, Period>;
    const auto now = Clock::now();
    if (budget <= Budget::zero()) return Deadline(now);
    if (budget >= std::chrono::duration_cast<Budget>(Clock::time_point::max() - now))
      return Deadline(Clock::time_point::max());
    return Deadline(now + std::chrono::duration_cast<Clock::duration>(budget));
  }
  static Deadline at(Clock::time_point when) { return Deadline(when); }

  bool passed() const { return Clock::now() >= when_; }
  std::chrono::nanoseconds left() const {
    const auto now = Clock::now();
    return when_ > now ? when_ - now : std::chrono::nanoseconds(0);
  }
  Clock::time_point when() const { return when_; }
  Deadline earlier(Deadline other) const { return Deadline(std::min(when_, other.when_)); }

 private:
  explicit Deadline(Clock::time_point when) : when_(when) {}
  Clock::time_point when_;
};

}  // namespace mooncake
