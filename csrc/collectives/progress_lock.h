#pragma once

#include <atomic>

#include "base/mutex.h"
#include "base/wait.h"

namespace mooncake {

// Progress lock: any waiter drives the messages of all. A waiter tries to take the lock and does
// not wait for it: it spins, or is about to sleep at the bell. The holder may be past the message
// of another waiter, and may never look again. So unlock() rings if any waiter was turned away.
//
// Why no waiter is forgotten. Only exchanges write turnedAway_, so all of them stand in one order,
// and each sees everything that happened before the exchange from which it reads:
//
//   turned away                                the holder
//     1  announced at the bell, then: try        1  unlock
//     2  turnedAway_ <- true                     2  turnedAway_ <- false; if it was true:
//     3  try again                               3  ring
//
// If the waiter's 2 comes before the holder's 2, then the holder, or a thread before it, reads
// `true` and rings after the waiter's announcement. The waiter does not fall asleep, or is woken
// (see Doorbell). If it comes after the holder's 2, it reads a value that the holder wrote after
// its unlock, so this holder does not make the waiter's 3 fail. If a later holder does, then that
// holder's own 2 is still to come, and the same holds for it.
class CAPABILITY("mutex") ProgressLock {
 public:
  explicit ProgressLock(Doorbell& bell) : bell_(bell) {}

  void lock() ACQUIRE() { mutex_.lock(); }
  bool try_lock() TRY_ACQUIRE(true) {
    if (mutex_.try_lock()) return true;
    turnedAway_.exchange(true, std::memory_order_acq_rel);
    return mutex_.try_lock();
  }
  void unlock() RELEASE() {
    mutex_.unlock();
    if (turnedAway_.exchange(false, std::memory_order_acq_rel)) bell_.ring();
  }

 private:
  Doorbell& bell_;
  Mutex mutex_;
  std::atomic<bool> turnedAway_{false};
};

}  // namespace mooncake
