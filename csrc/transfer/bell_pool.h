#pragma once

#include <deque>
#include <mutex>
#include <vector>

#include "base/wait.h"

namespace mooncake::transfer {

// Doorbells for those who wait for transfers, one at a time each. Whoever ends a transfer may still
// look at its bell when the waiter has long gone on, so they outlive the engine's channels and are
// used again, not given back.
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
