#pragma once

#include <atomic>
#include <mutex>

#include "base/wait.h"

namespace mooncake {

// Whose turn it is to move things on, where everybody who waits moves the things of all. Who waits
// tries for the turn and does not wait for it: it spins, or is about to sleep at the bell. Who has
// the turn may be past what the other waits for, and may be somebody who never looks again: so
// whoever was turned away is rung for when the turn ends, and looks by itself.
//
// Why nobody is forgotten. turnedAway_ is written by exchanges only, so all of them stand in one
// order, and each sees what happened before the one that it reads from:
//
//   turned away                                who has the turn
//     1  announced at the bell, then: try        1  unlock
//     2  turnedAway_ <- true                     2  turnedAway_ <- false; if it was true:
//     3  try again                               3  ring
//
// If our 2 comes before the other's 2, the other, or somebody before it, reads `true` and rings
// after our announcement: we do not fall asleep, or are woken (see Doorbell). If it comes after,
// it reads what the other wrote after its unlock, so that our 3 does not fail for that one; if it
// fails for somebody who came later, then that one's own 2 is still to come, and the same holds for
// it.
class Turn {
 public:
  explicit Turn(Doorbell& bell) : bell_(bell) {}

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
