// How a group ends on this rank.
#include "backend/device/recorded_calls.h"
#include "backend/mooncake_backend.h"
#include "backend/signals.h"
#include "base/log.h"

namespace mooncake {
namespace {

// Whoever runs an operation of a group that has failed ends it at its next look, or copy.
constexpr auto kToGetOut = std::chrono::seconds(10);

// Its destructor never runs.
template <typename T>
void leak(T& owner) {
  new T(std::move(owner));
}

}  // namespace

void MooncakeBackend::shutdown() {
  if (forkGeneration_ != forkGeneration()) return;
  if (!job_) return;
  if (!inOurWorld_) job_->leaveOthers(this, Farewell::How::kDestroyed);
  if (leaveGroup() && !inOurWorld_) job_->awaitRankZerosExit(*group_);
  if (!inOurWorld_) job_->sayGoodbye({});
}

bool MooncakeBackend::leaveGroup(Farewell::How how) {
  if (!group_ || forkGeneration_ != forkGeneration()) return false;
  std::lock_guard lock(leaveMutex_);
  const Deadline budget = Deadline::after(options_.env.failureTimeout);
  const bool usable = group_->usable().ok();
  // A signal handler has interrupted a wait of this thread, which goes on when the handler returns:
  // the handler waits for no operation.
  const bool isInside = Interruptible::isHandling();
  if (usable && how != Farewell::How::kFailed && !isInside) drainDevice(budget);
  const bool isIdle = usable && how != Farewell::How::kFailed &&
                      queue_->drain(isInside ? Deadline::after(Clock::duration::zero()) : budget);
  if (isIdle) {
    if (how == Farewell::How::kDestroyed) {
      group_->leave(budget);
    } else {
      group_->awaitEnded(budget);
    }
  }
  const Error over{ErrorCode::kAborted,
                   isInside && usable && !isIdle
                       ? "group '" + options_.groupName + "' on " + group_->nameRank(rank_) +
                             " was destroyed by a signal handler, in this operation of it"
                       : kDestroyed};
  group_->fail(over);
  if (isInside) {
    messages_->messages().abort(over);
  } else {
    messages_->stop();
  }
  return usable;
}

void MooncakeBackend::close() {
  if (forkGeneration_ != forkGeneration()) return leakAll();
  if (!job_) return;
  job_->remove(this);
  leaveGroup();
  // The signal handler's own thread may be in a call, and cannot leave it before this returns.
  if (Interruptible::isHandling() && group_ &&
      (CollectiveQueue::isCallerInside() || messages_->messages().drivers() > 0)) {
    if (ownRecordedCalls_) (void)ownRecordedCalls_->stop(Deadline::after(Clock::duration::zero()));
    return leakAll();
  }
  // Threads may still be in calls on works of ours. The group has failed: they leave at once.
  const bool areCallsOver =
      !ownRecordedCalls_ || ownRecordedCalls_->stop(Deadline::after(kToGetOut));
  if (group_ && !(areCallsOver && queue_->stop(Deadline::after(kToGetOut)) && messages_->stop())) {
    log(LogLevel::kError, job_->engine()->logName(), "group '", options_.groupName,
        "' was destroyed while a thread is in an operation of it, which it does not leave: the "
        "group's memory and threads are kept until the process ends");
    return leakAll();
  }
  recordedCalls_ = nullptr;
  ownRecordedCalls_.reset();
  queue_.reset();
  messages_.reset();
  group_.reset();
  completions_.reset();
  job_.reset();
  options_.engine.reset();
}

void MooncakeBackend::leakAll() {
  leak(ownRecordedCalls_);
  leak(queue_);
  leak(messages_);
  leak(group_);
  leak(completions_);
  leak(job_);
}

void MooncakeBackend::leaveJob(const Farewell& farewell) {
  if (!job_ || forkGeneration_ != forkGeneration()) return;
  job_->leaveOthers(this, farewell.how);
  leaveGroup(farewell.how);
  job_->sayGoodbye(farewell);
  if (ownRecordedCalls_) (void)ownRecordedCalls_->stop(Deadline::after(kToGetOut));
  // A thread that asks for Python's lock while Python ends is ended by it, and the process with it.
  completions_->drain(Deadline::after(options_.env.failureTimeout));
}

void MooncakeBackend::abort() {
  refuseInForkedChild();
  runAbortHooks();
  group_->fail({ErrorCode::kAborted, "the process group was aborted"});
  messages_->messages().abort({ErrorCode::kAborted, "the process group was aborted"});
}

}  // namespace mooncake
