#include "backend/signals.h"

namespace mooncake {
namespace {

RunSignalHandlers runHandlers = nullptr;
pthread_t handlersThread;

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

void Interruptible::onSleep() {
  if (raised_.exception) return;
  raised_ = runHandlers();
  if (raised_.exception) giveUp(raised_.name + " was raised while this rank waited for it");
}

}  // namespace mooncake
