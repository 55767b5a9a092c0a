#include "backend/signals.h"

namespace mooncake {
namespace {

RunSignalHandlers runHandlers = nullptr;
pthread_t handlersThread;
thread_local int handling = 0;

}  // namespace

void setRunSignalHandlers(RunSignalHandlers run, pthread_t thread) {
  handlersThread = thread;
  runHandlers = run;
}

Interruptible::Interruptible()
    : isActive_(runHandlers != nullptr && ::pthread_equal(::pthread_self(), handlersThread)) {
  if (isActive_) before_ = exchange(this);
}

Interruptible::~Interruptible() {
  if (isActive_) exchange(before_);
}

bool Interruptible::isHandling() { return handling > 0; }

void Interruptible::onSleep() {
  if (raised_.exception) return;
  ++handling;
  raised_ = runHandlers();
  --handling;
  if (raised_.exception) giveUp(raised_.name + " was raised while this rank waited for it");
}

}  // namespace mooncake
