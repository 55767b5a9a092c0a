#pragma once

#include <deque>
#include <mutex>
#include <vector>

#include "base/wait.h"

namespace mooncake::transfer {

// Doorbells for threads that wait for transfers; each serves one waiter at a time. A thread that
// ends a transfer may still read its bell after the waiter has gone on. Bells therefore outlive the
// engine's channels, and are reused instead of freed.
class BellPool {
 public:
  Doorbell& take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return bells_.emplace_back();
    Doorbell& bell = *free_.back();
    free_.pop_back();
    return bell;
  }
  void give(Doorbell& bell) {
    std::lock_guard lock(mutex_);
    free_.push_back(&bell);
  }

 private:
  std::mutex mutex_;  // guards all below
  std::deque<Doorbell> bells_;
  std::vector<Doorbell*> free_;
};

}  // namespace mooncake::transfer
