#pragma once

#include <exception>
#include <pthread.h>
#include <string>

#include "base/result.h"
#include "base/wait.h"

namespace mooncake {

// What a handler of one of the program's signals raised.
struct RaisedBySignal {
  std::exception_ptr exception;  // null: nothing
  std::string name;              // "KeyboardInterrupt"
};

// Runs the handlers of the signals that have come, on the one thread that may. Set once, before the
// first group is made.
using RunSignalHandlers = RaisedBySignal (*)();
void setRunSignalHandlers(RunSignalHandlers run, pthread_t thread);

// While one lives on the thread that runs signal handlers, waits of this thread run them, and when
// one raises something, give up. A wait that is over before it sleeps knows nothing of it.
class Interruptible : private SleepObserver {
 public:
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  // For waits at a condition variable: asks now and then. False: they may sleep for good.
  bool isActive() const { return isActive_; }
  using SleepObserver::kInterval;
  void onSleep() override;
  // What has been raised, if something was. After the wait.
  void rethrow() const {
    if (raised_.exception) std::rethrow_exception(raised_.exception);
  }
  bool wasInterrupted() const { return raised_.exception != nullptr; }
  // The calling thread runs handlers, which have interrupted a wait of its own.
  static bool isHandling();

 protected:
  Interruptible();
  ~Interruptible();
  // Has to end the wait. `why` names what was raised.
  virtual void giveUp(const std::string& why) = 0;

 private:
  const bool isActive_;
  SleepObserver* before_ = nullptr;
  RaisedBySignal raised_;
};

}  // namespace mooncake
