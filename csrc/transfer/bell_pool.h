#pragma once

#include <deque>
#include <vector>

#include "base/mutex.h"
#include "base/wait.h"

namespace mooncake::transfer {

// Doorbells for threads that wait for transfers; each serves one waiter at a time. A thread that
// ends a transfer may still read its bell after the waiter has gone on. Bells therefore outlive the
// engine's channels, and are reused instead of freed.
class BellPool {
 public:
  Doorbell& take() {
    Lock lock(mutex_);
    if (free_.empty()) return bells_.emplace_back();
    Doorbell& bell = *free_.back();
    free_.pop_back();
    return bell;
  }
  void give(Doorbell& bell) {
    Lock lock(mutex_);
    free_.push_back(&bell);
  }

 private:
  Mutex mutex_;
  std::deque<Doorbell> bells_ GUARDED_BY(mutex_);
  std::vector<Doorbell*> free_ GUARDED_BY(mutex_);
};

}  // namespace mooncake::transfer
