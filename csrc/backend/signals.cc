#include "backend/signals.h"

#include <utility>

namespace mooncake {
namespace {

RunSignalHandlers runHandlers = nullptr;
pthread_t handlersThread;
thread_local int handling = 0;
thread_local Interruptible* innermost = nullptr;
thread_local Clock::time_point nextLook;

}  // namespace

void setRunSignalHandlers(RunSignalHandlers run, pthread_t thread) {
  handlersThread = thread;
  runHandlers = run;
}

Interruptible::Interruptible()
    : isActive_(runHandlers != nullptr && ::pthread_equal(::pthread_self(), handlersThread)) {
  if (!isActive_) return;
  before_ = exchange(this);
  outer_ = std::exchange(innermost, this);
}

Interruptible::~Interruptible() {
  if (!isActive_) return;
  exchange(before_);
  innermost = outer_;
}

bool Interruptible::isHandling() { return handling > 0; }

void Interruptible::look() {
  if (!innermost || Clock::now() < nextLook) return;
  nextLook = Clock::now() + kInterval;
  innermost->onSleep();
}

void Interruptible::onSleep() {
  if (raised_.exception) return;
  ++handling;
  raised_ = runHandlers();
  --handling;
  if (raised_.exception) giveUp(raised_.name + " was raised while this rank waited for it");
}

}  // namespace mooncake
