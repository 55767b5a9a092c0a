#pragma once

#include <exception>
#include <pthread.h>
#include <string>

#include "base/result.h"
#include "base/wait.h"

namespace mooncake {

// The exception that a signal handler of the program raised.
struct RaisedBySignal {
  std::exception_ptr exception;  // null: none
  std::string name;              // "KeyboardInterrupt"
};

// Runs the handlers of the signals that have come. Only one thread may: Python's main thread. Set
// once, before the first group is made.
using RunSignalHandlers = RaisedBySignal (*)();
void setRunSignalHandlers(RunSignalHandlers run, pthread_t thread);

// While an object lives on the thread that runs signal handlers, waits of this thread run them. If
// a handler raises, giveUp() ends the wait. A wait that is over before it sleeps runs no handler.
class Interruptible : private SleepObserver {
 public:
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // For waits at a condition variable. True: they must call onSleep() every kInterval. False: they
  // may sleep for good.
  bool isActive() const { return isActive_; }
  using SleepObserver::kInterval;
  void onSleep() override;
  // For waits of another kind, in their pauses: the innermost object of this thread runs the
  // handlers, if the last time was kInterval ago. Does nothing without an object.
  static void look();
  // After the wait: rethrows the exception that a handler raised, if one did.
  void rethrow() const {
    if (raised_.exception) std::rethrow_exception(raised_.exception);
  }
  bool wasInterrupted() const { return raised_.exception != nullptr; }
  // True if the calling thread is in a signal handler that has interrupted a wait of its own.
  static bool isHandling();

 protected:
  Interruptible();
  ~Interruptible();
  // Must end the wait. `why` names the exception.
  virtual void giveUp(const std::string& why) = 0;

 private:
  const bool isActive_;
  SleepObserver* before_ = nullptr;
  Interruptible* outer_ = nullptr;
  RaisedBySignal raised_;
};

// For a wait that may end early without harm: its caller looks at wasInterrupted().
class WaitInterrupt final : public Interruptible {
  void giveUp(const std::string&) override {}
};

}  // namespace mooncake
