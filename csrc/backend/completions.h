#pragma once

#include <functional>
#include <memory>

#include "backend/callbacks.h"
#include "base/deadline.h"
#include "base/result.h"

namespace mooncake {

// The thread that marks futures and drops tensors: their Python halves need Python's lock. Python's
// callbacks of futures run on threads of their own: see callbacks(). A callback that torch itself
// runs where the future is marked may wait in one of our calls: another thread takes over then.
class Completions {
 public:
  Completions();
  ~Completions();  // runs what was posted; may be one of its own tasks that drops it

  // Starts the thread, unless it runs. Fails where the system has none; post() tries again.
  Status start();
  // One after the other in this order.
  void post(std::function<void()> task);
  const std::shared_ptr<Callbacks>& callbacks() const { return callbacks_; }
  // All posted tasks have ended. Callbacks may still run.
  bool isIdle() const;
  // Waits until all posted tasks and callbacks have ended. Returns false if the deadline passes.
  // Does not wait on a thread that runs one of them.
  bool drain(Deadline deadline);

  // The calling thread is about to wait: if it is the one that marks futures, another one does so
  // from now on.
  static void giveWorkAway();

 private:
  struct State;

  const std::shared_ptr<State> state_;
  const std::shared_ptr<Callbacks> callbacks_ = std::make_shared<Callbacks>();
};

}  // namespace mooncake
