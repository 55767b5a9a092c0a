#pragma once

#include <cstdint>
#include <functional>

#include "base/deadline.h"

namespace mooncake {

// The calls of a group that graphs have, and the one order of their replays and of all other calls.
class Replays {
 public:
  virtual ~Replays() = default;

  // Around the mark of a call that is not recorded, or for one that has none. The second function
  // makes the call later, on another thread, when its turn in the order has come. From one thread at
  // a time. announce() throws; after it, follow() or skip() must be called.
  virtual uint32_t announce() = 0;
  virtual void follow(uint32_t number, std::function<void()> call) = 0;
  virtual void skip() = 0;

  // Waits until all calls have their place and all replays so far have ended, or for the deadline.
  virtual void drain(Deadline deadline) = 0;
  // Waits until all calls so far have their place, or for the deadline.
  virtual void settle(Deadline deadline) = 0;
  // Makes the calls that wait for their place, and lets later replays pass. Call it after the group
  // has failed. Returns false if a thread is in an operation by the deadline: it does that when it
  // leaves the operation.
  virtual bool stop(Deadline deadline) = 0;
};

}  // namespace mooncake
