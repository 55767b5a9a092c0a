#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>

#include "base/deadline.h"

namespace mooncake {

// Runs the callbacks of futures one at a time, in the order of post(), so that operations that
// callbacks call have the same order on all ranks.
//
// A callback that waits in one of our calls gives its turn away, and another thread goes on with
// the next callback. When the wait is over, the callback takes the turn again in its place: behind
// the callbacks that were posted before the awaited operation ended, ahead of all later ones.
class Callbacks {
 public:
  // A place in the order of the callbacks.
  using Moment = uint64_t;
  static constexpr Moment kNever = std::numeric_limits<Moment>::max();

  Callbacks();
  // Callbacks that were posted still run, and the destructor does not wait for them.
  ~Callbacks();
  Callbacks(const Callbacks&) = delete;
  Callbacks& operator=(const Callbacks&) = delete;

  void post(std::function<void()> callback);
  // True if all posted callbacks have ended.
  bool isIdle() const;
  // Waits until isIdle(). Returns false if the deadline passed first. Always true in a callback.
  bool drain(Deadline deadline);

  // The calling thread runs a callback of this object.
  bool isCallerInside() const;
  // Replaces kNever by the present moment: the end that callbacks await() has come.
  void stamp(std::atomic<Moment>& moment);
  // The same for an end that came while isIdle() was true: all callbacks come after it.
  void stampPast(std::atomic<Moment>& moment);
  // In a callback: gives the turn away until the moment has been stamped and has come. Returns
  // false if it was not stamped before the deadline.
  bool await(const std::atomic<Moment>& moment, Deadline deadline);

  // Gives the turn away while it lives, if made in a callback. Elsewhere it does nothing.
  class Pause;

 private:
  struct State;

  const std::shared_ptr<State> state_;
};

class Callbacks::Pause {
 public:
  Pause();
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  struct Entry;
  const std::unique_ptr<Entry> entry_;
};

}  // namespace mooncake
