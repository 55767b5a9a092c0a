#pragma once

#include <atomic>
#include <mutex>

#include "base/wait.h"

namespace mooncake {

// Progress lock: any waiter drives everyone's messages. A waiter tries for the lock and does not
// wait for it: it spins, or is about to sleep at the bell. The holder may be past what another
// waiter needs, and may never look again: unlock() therefore rings for everyone who was turned
// away.
//
// Why nobody is forgotten. turnedAway_ is written by exchanges only, so all of them stand in one
// order, and each sees what happened before the one that it reads from:
//
//   turned away                                the holder
//     1  announced at the bell, then: try        1  unlock
//     2  turnedAway_ <- true                     2  turnedAway_ <- false; if it was true:
//     3  try again                               3  ring
//
// If our 2 comes before the other's 2, the other, or somebody before it, reads `true` and rings
// after our announcement: we do not fall asleep, or are woken (see Doorbell). If it comes after,
// it reads what the other wrote after its unlock, so that our 3 does not fail for that one; if it
// fails for somebody who came later, then that one's own 2 is still to come, and the same holds for
// it.
class ProgressLock {
 public:
  explicit ProgressLock(Doorbell& bell) : bell_(bell) {}

  void lock() { mutex_.lock(); }
  bool try_lock() {
    if (mutex_.try_lock()) return true;
    turnedAway_.exchange(true, std::memory_order_acq_rel);
    return mutex_.try_lock();
  }
  void unlock() {
    mutex_.unlock();
    if (turnedAway_.exchange(false, std::memory_order_acq_rel)) bell_.ring();
  }

 private:
  Doorbell& bell_;
  std::mutex mutex_;
  std::atomic<bool> turnedAway_{false};
};

}  // namespace mooncake
