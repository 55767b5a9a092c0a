#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "base/event_loop.h"

namespace mooncake {

// Has an event loop look for copies of devices that have ended, as no device wakes a thread. It looks
// in each turn of the loop. If nothing has ended for 200 us, it looks every millisecond.
class CopyWatch {
 public:
  // `look` runs on the loop's thread. It returns the number of copies that have ended so far.
  CopyWatch(EventLoop& loop, std::function<uint64_t()> look)
      : loop_(loop), look_(std::move(look)) {}

  // Looks once, soon. Any thread. `owner` keeps this object alive until then.
  void lookSoon(std::shared_ptr<const void> owner);

 private:
  void look();

  EventLoop& loop_;
  const std::function<uint64_t()> look_;
  std::atomic<bool> isDue_{false};
  std::atomic<bool> isSlow_{false};
  // Used on the loop's thread only.
  uint64_t ended_ = 0;
  Clock::time_point looked_;
  Clock::time_point changed_;  // when ended_ last changed
};

}  // namespace mooncake
