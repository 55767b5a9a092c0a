#include "backend/leaving.h"

#include <chrono>
#include <string>

#include "backend/device_half.h"
#include "backend/signals.h"
#include "base/log.h"

namespace mooncake {
namespace {

// Time between two looks whether the other members end, too.
constexpr auto kLookAtLeavers = std::chrono::milliseconds(10);

Deadline atOnce() { return Deadline::after(Clock::duration::zero()); }

}  // namespace

Leaving::Leaving(LiveGroup& group, DeviceHalf& devices) : group_(group), devices_(devices) {
  group_.job().add(this, [this](Farewell::How how) { leaveGroup(how); });
}

void Leaving::takeOver(const Leaving& other) { group_.job().moveHead(&other, this); }

void Leaving::shutdown() {
  if (group_.isForkedChild() || !group_.isOpen()) return;
  Job& job = group_.job();
  const bool isHead = job.isHead(this);
  if (isHead) job.leaveOthers(this, Farewell::How::kDestroyed);
  if (leaveGroup() && isHead && group_.jobRank(0) == 0) job.awaitRankZerosExit(*group_.group());
  if (isHead) job.sayGoodbye({});
}

// An operation that the other members never call goes on without them when their leave reports have
// come. If their programs end, no reports come. And they say no goodbye while they wait in another
// group until this rank leaves that group.
bool Leaving::drainQueue(Farewell::How how, Deadline budget) {
  CollectiveQueue& queue = *group_.queue();
  if (how == Farewell::How::kDestroyed) return queue.drain(budget);
  while (!queue.drain(budget.earlier(Deadline::after(kLookAtLeavers)))) {
    if (budget.passed() || group_.group()->agent().doAllLeave()) return false;
  }
  return true;
}

bool Leaving::leaveGroup(Farewell::How how) {
  if (!group_.isOpen() || group_.isForkedChild()) return false;
  hasLeft_ = true;
  Lock lock(mutex_);
  const std::shared_ptr<Group> group = group_.group();
  const Deadline budget = Deadline::after(group_.options().env.failureTimeout);
  const bool usable = group->usable().ok();
  // Other members may need the series that went on without this rank.
  if (group_.line().isRemoved()) (void)group_.line().settle(budget);
  // A signal handler has interrupted a wait of this thread, which goes on when the handler returns:
  // the handler waits for no operation.
  const bool isInside = Interruptible::isHandling();
  if (usable && how != Farewell::How::kFailed && !isInside) devices_.drain(budget);
  const bool isIdle =
      usable && how != Farewell::How::kFailed && drainQueue(how, isInside ? atOnce() : budget);
  if (isIdle) {
    if (how == Farewell::How::kDestroyed) {
      (void)group_.line().settle(budget);  // others may need the series before this one
      group->leave(budget);
    } else {
      group->awaitEnded(budget);
    }
  }
  const Error over{ErrorCode::kAborted,
                   isInside && usable && !isIdle
                       ? "group '" + group_.options().groupName + "' on " +
                             group->nameRank(group_.rank()) +
                             " was destroyed by a signal handler, in this operation of it"
                       : LiveGroup::kDestroyed};
  group->fail(over);
  if (group_.line().isNewcomer() && !isInside) group_.line().stop();  // ends join()
  if (isInside) {
    group_.messages()->messages().abort(over);
  } else {
    group_.messages()->stop();
  }
  return usable;
}

void Leaving::close() {
  if (group_.isForkedChild()) return group_.leak();
  if (!group_.isOpen()) return;
  group_.job().remove(this);
  leaveGroup();
  // The signal handler's own thread may be in a call, and cannot leave it before this returns.
  if (Interruptible::isHandling() &&
      (CollectiveQueue::isCallerInside() || group_.messages()->messages().drivers() > 0)) {
    (void)group_.order().stop(atOnce());
    return group_.leak();
  }
  // Threads may still be in calls on works of ours. The group has failed: they leave at once.
  if (group_.stop()) return group_.drop();
  log(LogLevel::kError, group_.job().engine()->logName(), "group '", group_.options().groupName,
      "' was destroyed while a thread is in an operation of it, which it does not leave: the "
      "group's memory and threads are kept until the process ends");
  group_.leak();
}

void Leaving::leaveJob(const Farewell& farewell) {
  if (!group_.isOpen() || group_.isForkedChild()) return;
  group_.job().leaveOthers(this, farewell.how);
  leaveGroup(farewell.how);
  group_.job().sayGoodbye(farewell);
  (void)group_.order().stop(Deadline::after(LiveGroup::kToGetOut));
  // A thread that asks for Python's lock while Python ends is ended by it, and the process with it.
  group_.completions()->drain(Deadline::after(group_.options().env.failureTimeout));
}

}  // namespace mooncake
