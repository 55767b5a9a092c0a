#pragma once

#include <algorithm>
#include <chrono>

namespace mooncake {

using Clock = std::chrono::steady_clock;

// The point in time at which a wait gives up. Every wait has one.
class Deadline {
 public:
  static Deadline after(std::chrono::nanoseconds budget) {
    const auto now = Clock::now();
    const auto room = Clock::time_point::max() - now;
    return Deadline(now +
                    std::min<Clock::duration>(std::max(budget, std::chrono::nanoseconds(0)), room));
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
