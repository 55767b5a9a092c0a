#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "base/deadline.h"

namespace mooncake {

// The thread that may wait for Python's lock: it marks futures, runs their callbacks and drops
// tensors, whose Python halves need that lock too. Nobody else of ours ever does. A callback may
// wait for what only another task brings: others take over then, up to four.
class Completions {
 public:
  Completions();
  ~Completions();  // runs what was posted; may be one of its own tasks that drops it

  // One after the other in this order, as long as none takes long.
  void post(std::function<void()> task);
  // Until all that was posted has run, or the deadline has passed.
  bool drain(Deadline deadline);
  // The same for all there are in this process, those of groups that were destroyed and that
  // somebody still holds included.
  static void drainAll(Deadline deadline);

 private:
  struct State;
  struct Registry;
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

}  // namespace mooncake
