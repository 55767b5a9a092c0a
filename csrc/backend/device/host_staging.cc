#include "backend/device/host_staging.h"

#include "backend/device/device_scope.h"
#include "base/failpoint.h"

namespace mooncake {

HostStaging::~HostStaging() {
  dropOnDevice([&]() NOT_CHECKED { done_.reset(); });  // no other thread has it any more
}

void HostStaging::mark() {
  markReached();
  failpoint("stage-marked");
}

Status HostStaging::fetch(Group& group) {
  const DeviceScope on(stream().device());
  MOONCAKE_TRY(awaitReached(group));
  isReached_ = true;
  copyIn(stream());
  failpoint("stage-copies-in");
  if (comesInPieces()) return awaitInput(group, 1);
  c10::Event copied(stream().device_type());
  copied.record(stream());
  return awaitOnHost(group, [&] { return copied.query(); });
}

void HostStaging::giveBack() {
  Lock lock(mutex_);
  if (isEnded_) return;
  const DeviceScope on(stream().device());
  if (!isReached_) reached().block(stream());  // without fetch(), for outputs alone
  copyResults();
  done_->record(stream());
  isGiven_ = isEnded_ = true;  // not if torch has thrown: a later call copies again
  forgetTensors();
}

void HostStaging::abandon() {
  Lock lock(mutex_);
  isEnded_ = true;
}

bool HostStaging::isOver() const {
  return !hasOutputs() || isDone();  // a barrier has none, for example
}

bool HostStaging::isGiven() const {
  Lock lock(mutex_);
  return isGiven_;
}

bool HostStaging::isDone() const {
  Lock lock(mutex_);
  return isGiven_ && done_->query();
}

void HostStaging::block() {
  Lock lock(mutex_);
  if (isGiven_) done_->block(callersStream());
}

void HostStaging::synchronize() const {
  Lock lock(mutex_);
  if (isGiven_) done_->synchronize();
}

}  // namespace mooncake
