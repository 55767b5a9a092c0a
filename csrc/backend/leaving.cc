// How a group ends here, and with the last word of the default one its job.
#include "backend/c10d_store.h"
#include "backend/mooncake_backend.h"
#include "backend/signals.h"
#include "base/log.h"

namespace mooncake {
namespace {

// Rank 0 may live on, and its store, too: they are not waited for longer than this.
constexpr auto kRankZeroEnds = std::chrono::milliseconds(200);
constexpr auto kStoreEnds = std::chrono::milliseconds(50);
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
  if (!inOurWorld_) leaveOthersOfJob(Farewell::How::kDestroyed);
  if (leaveGroup() && rankZeroStore_) waitForRankZerosExit();
  if (!inOurWorld_) sayGoodbye({});
}

bool MooncakeBackend::leaveGroup(Farewell::How how) {
  if (!group_ || forkGeneration_ != forkGeneration()) return false;
  std::lock_guard lock(leaveMutex_);
  const Deadline budget = Deadline::after(options_.env.failureTimeout);
  const bool usable = group_->usable().ok();
  // A signal handler has interrupted a wait of this thread, which goes on when the handler returns:
  // the handler waits for no operation.
  const bool isInside = Interruptible::isHandling();
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

void MooncakeBackend::leaveOthersOfJob(Farewell::How how) {
  std::lock_guard lock(job_->mutex);
  for (MooncakeBackend* group : job_->groups) {
    if (group != this) group->leaveGroup(how);
  }
}

void MooncakeBackend::sayGoodbye(const Farewell& farewell) {
  job_->hasLeft = true;
  if (membership_) membership_->leave();
  if (!options_.engine || farewell.how != Farewell::How::kDestroyed)
    return engine_->leave(farewell);
  // The engine stays. Whoever transfers from or to one of them opens it again.
  const Deadline budget = Deadline::after(options_.env.failureTimeout);
  for (int rank = 0; membership_ && rank < membership_->size(); ++rank) {
    const auto& peer = membership_->peer(rank);
    if (!peer) continue;
    const Status forgotten = engine_->forget(peer, budget);
    if (!forgotten.ok()) log(LogLevel::kInfo, engine_->logName(), forgotten.error().message);
  }
}

// As a rule rank 0 holds the server of the store. Until it has let go of it, our next
// init_process_group() at the same address would find the old one.
void MooncakeBackend::waitForRankZerosExit() {
  Waiter waiter = group_->waiter(Deadline::after(kRankZeroEnds));
  const auto isGone = [&] { return group_->window().disconnection(0) != nullptr; };
  while (waiter.until(isGone) == WaitResult::kInterrupted)
    waiter.generation = waiter.interrupt.generation();
  if (isGone()) awaitServersEnd(rankZeroStore_, Deadline::after(kStoreEnds));
}

void MooncakeBackend::close() {
  if (forkGeneration_ != forkGeneration()) return leakAll();
  {
    std::lock_guard lock(job_->mutex);
    job_->groups.erase(this);
  }
  leaveGroup();
  // The signal handler's own thread may be in a call, and cannot leave it before this returns.
  if (Interruptible::isHandling() && group_ &&
      (CollectiveQueue::isCallerInside() || messages_->messages().drivers() > 0))
    return leakAll();
  // Threads may still be in calls on works of ours. The group has failed: they leave at once.
  if (group_ && !(queue_->stop(Deadline::after(kToGetOut)) && messages_->stop())) {
    log(LogLevel::kError, engine_->logName(), "group '", options_.groupName,
        "' was destroyed while a thread is in an operation of it, which it does not leave: the "
        "group's memory and threads are kept until the process ends");
    return leakAll();
  }
  queue_.reset();
  messages_.reset();
  group_.reset();
  membership_.reset();
  completions_.reset();
  engine_.reset();
  options_.engine.reset();
}

void MooncakeBackend::leakAll() {
  leak(queue_);
  leak(messages_);
  leak(group_);
  leak(membership_);
  leak(completions_);
  leak(engine_);
}

void MooncakeBackend::leaveJob(const Farewell& farewell) {
  if (!engine_ || forkGeneration_ != forkGeneration()) return;
  leaveOthersOfJob(farewell.how);
  leaveGroup(farewell.how);
  sayGoodbye(farewell);
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
