#include "group/flush_agent.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "base/log.h"
#include "group/group.h"

namespace mooncake {
namespace {

// While we leave: nobody rings when it ends an operation.
constexpr auto kLookAtWords = std::chrono::milliseconds(1);
constexpr auto kAskAgain = std::chrono::milliseconds(20);
// A member that does not report is either alive, and then it does, or the job's view loses it. This
// is for the case that neither holds.
constexpr int kBudgets = 10;  // of failure_timeout

}  // namespace

bool GroupView::contains(int rank) const { return std::ranges::binary_search(active, rank); }

FlushAgent::FlushAgent(Group& group, Membership& membership, uint64_t topic,
                       std::vector<int> jobRanks, bool raises, bool founds)
    : group_(group),
      membership_(membership),
      topic_(topic),
      jobRanks_(std::move(jobRanks)),
      raises_(raises),
      founds_(founds),
      endedWord_(&group.endedWord(group.rank())),
      knownEnded_(group.size()) {
  auto view = std::make_shared<GroupView>();
  const View job = membership_.view();
  for (int r = 0; r < group.size(); ++r) {
    view->active.push_back(r);
    if (!job.active.contains(jobRanks_[r])) ++lostBefore_;
    if (const auto& peer = membership_.peer(jobRanks_[r])) ranksById_[peer->id] = r;
  }
  active_ = decided_ = view->active;
  view_ = std::move(view);
}

// In this order: what is answered to a message may be lost with its connection, and then we must be
// told of that.
void FlushAgent::start() {
  membership_.subscribe(this);
  group_.engine().openTopic(
      topic_, [this](const EngineId& from, ByteView message) { onMessage(from, message); });
}

// The loop's tasks have ended when this returns, and later ones do nothing: a timer may still hold
// us for a moment, and nothing that we refer to.
void FlushAgent::stop() {
  {
    std::lock_guard lock(mutex_);
    isStopped_ = true;
    frozen_ = false;
  }
  membership_.unsubscribe(this);  // behind the loop's tasks
  group_.engine().closeTopic(topic_);
}

FlushAgent::Step::~Step() { agent_.carryOut(lock_); }

// In the order in which it was asked for: while one thread is at it, the others leave theirs to it.
// So a caller never waits for the loop's system calls.
void FlushAgent::carryOut(std::unique_lock<std::mutex>& lock) {
  if (isActing_) return;
  isActing_ = true;
  while (!due_.empty()) {
    const auto due = std::exchange(due_, {});
    lock.unlock();
    std::vector<int> unsent;
    for (const Action& action : due) {
      if (!perform(action)) unsent.push_back(std::get<Message>(action).to);
    }
    lock.lock();
    leaveUnsent_.insert(leaveUnsent_.end(), unsent.begin(), unsent.end());
  }
  isActing_ = false;
}

// False: a leave report that has to be sent again. Whatever else is not sent is asked for again.
bool FlushAgent::perform(const Action& action) {
  if (const auto* message = std::get_if<Message>(&action)) {
    failpoint("tell");
    const Bytes bytes =
        ByteWriter().put(static_cast<uint8_t>(message->kind)).putRaw(message->body).take();
    // Who cannot be reached is out soon, or connected anew.
    const auto& peer = membership_.peer(jobRanks_[message->to]);
    const Status sent = group_.engine().send(*peer, topic_, bytes);
    return message->kind != MessageKind::kLeft || sent.code() != ErrorCode::kExhausted;
  }
  if (const auto* part = std::get_if<Part>(&action)) {
    failpoint("supply");
    group_.putPart(part->copy, part->to);
  } else {
    logLine(LogLevel::kDebug, group_.engine().logName(), std::get<std::string>(action));
  }
  return true;
}

// -- what the caller does --

Status FlushAgent::beginSlowly(uint64_t number) {
  for (;;) {
    {
      const Step step(*this);
      busy_ = false;
      if (auto usable = group_.usable(); !usable.ok()) return usable;
      if (ended() >= number) return howEnded(number);
      if (!frozen_) {
        busy_ = true;
        return {};
      }
      report();
    }
    MOONCAKE_TRY(awaitDecision());
  }
}

Status FlushAgent::awaitDecision() {
  const auto budget = kBudgets * group_.engine().env().failureTimeout;
  Waiter waiter = group_.waiter(Deadline::after(budget));
  for (;;) {
    const auto how = waiter.until([&] { return !isFrozen(); });
    if (auto usable = group_.usable(); !usable.ok()) return usable;
    if (how == WaitResult::kReady) return {};
    waiter.generation = waiter.interrupt.generation();
    if (how == WaitResult::kInterrupted) continue;
    std::string missing;
    {
      std::lock_guard lock(mutex_);
      for (const int r : active_) {
        if (isMissing(r)) missing += (missing.empty() ? "" : ", ") + group_.nameRank(r);
      }
    }
    group_.fail({ErrorCode::kTimeout,
                 "group '" + group_.name() + "' on " + group_.nameRank(group_.rank()) +
                     " could not agree on how its operation ends: no report of " + missing +
                     ", which the job believes alive. Destroy the group and make it again"});
  }
}

FlushAgent::Resolution FlushAgent::resolve(uint64_t number, FlushReport::AbortReason abort,
                                           Error why) {
  {
    std::lock_guard lock(mutex_);
    isResolving_ = true;
  }
  const Resolution resolution = awaitResolved(number, abort, std::move(why));
  std::lock_guard lock(mutex_);
  isResolving_ = false;
  return resolution;
}

FlushAgent::Resolution FlushAgent::awaitResolved(uint64_t number, FlushReport::AbortReason abort,
                                                 Error why) {
  for (;;) {
    {
      const Step step(*this);
      busy_ = false;
      if (auto usable = group_.usable(); !usable.ok())
        return {Resolution::Kind::kEnded, usable, nullptr};
      if (abort != FlushReport::AbortReason::kNone && !(frozen_ && reported_)) {
        abortReason_ = abort;  // [abort]
        abortNumber_ = number;
        why_ = std::move(why);
      }
      if (frozen_) {
        report();
      } else {
        join({attempt_.losses, attempt_.round + 1}, "our operation cannot go on");  // [start-round]
      }
    }
    for (;;) {
      if (auto decided = awaitDecision(); !decided.ok())
        return {Resolution::Kind::kEnded, decided, nullptr};
      const Step step(*this);
      if (ended() >= number) return {Resolution::Kind::kEnded, howEnded(number), view_};
      if (frozen_) {  // again, in the meantime
        report();
        continue;
      }
      busy_ = true;
      isTaking_ = toTake_ == number;
      return {isTaking_ ? Resolution::Kind::kTake : Resolution::Kind::kAgain, {}, nullptr};
    }
  }
}

Status FlushAgent::awaitSlot(uint64_t number) {
  if (number <= 2 || allBegan_ + 1 >= number) return {};
  // Without a deadline of the operation: who is waited for is copying, or is out soon.
  const auto budget = Deadline::after(kBudgets * group_.engine().env().failureTimeout);
  for (;;) {
    const Waiter waiter = group_.waiter(budget.earlier(Deadline::after(resendAfter())));
    const auto how = waiter.until([&] { return isFrozen() || isSlotFree(number); });
    if (auto usable = group_.usable(); !usable.ok()) return usable;
    if (isFrozen()) return {ErrorCode::kInterrupted, ""};
    if (how == WaitResult::kReady) return {};
    if (how == WaitResult::kInterrupted) continue;
    if (budget.passed()) {
      group_.fail({ErrorCode::kTimeout, "group '" + group_.name() +
                                            "': a member has not come back from operation #" +
                                            std::to_string(number - 2)});
    }
    // What it said when it came back may be lost.
    const Step step(*this);
    for (const int r : active_) {
      if (holdsSlot(r, number)) tell(r, MessageKind::kAsk, {});
    }
  }
}

bool FlushAgent::isSlotFree(uint64_t number) const {
  std::lock_guard lock(mutex_);
  return std::ranges::none_of(active_, [&](int r) { return holdsSlot(r, number); });
}

// With the lock: it may still read the slot that this operation is to use.
bool FlushAgent::holdsSlot(int rank, uint64_t number) const {
  return rank != group_.rank() && !left_.contains(rank) && knownEnded_[rank] + 2 < number;
}

bool FlushAgent::missesLeaverSlowly(uint64_t number) const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(left_, [&](const auto& one) {
    return one.second.ended < number && view_->contains(one.first);
  });
}

void FlushAgent::end(uint64_t number, const Status& status) {
  if (!status.ok()) {
    std::lock_guard lock(mutex_);
    remember(number, status.error());
  }
  failpoint("ended");
  endedWord_->store(number, std::memory_order_release);
  failpoint("copy-out");
  busy_.store(false, std::memory_order_release);
  if (!isTaking_ && !isFrozen()) return;

  const Step step(*this);
  if (std::exchange(isTaking_, false)) {
    // What came after it ended with an error that we know already.
    while (errorOf(ended() + 1)) endedWord_->store(ended() + 1, std::memory_order_release);
    tellAll(MessageKind::kEnded, endedNow());
  }
  report();
}

void FlushAgent::awaitEnded(uint64_t number, Deadline deadline) {
  const auto isDone = [&](int r) {
    return r == group_.rank() || !isActive(r) || endedOf(r) >= number;
  };
  const auto allDone = [&] {
    for (int r = 0; r < group_.size(); ++r) {
      if (!isDone(r)) return false;
    }
    return true;
  };
  for (auto ask = Clock::now(); !allDone() && group_.usable().ok() && !deadline.passed();) {
    auto look = kAskAgain;
    for (int r = 0; r < group_.size(); ++r) {
      if (isDone(r)) continue;
      if (group_.window().peerPtr(r)) {
        look = kLookAtWords;
      } else if (Clock::now() >= ask) {
        const Step step(*this);
        tell(r, MessageKind::kAsk, {});
      }
    }
    if (Clock::now() >= ask) ask = Clock::now() + kAskAgain;
    Waiter waiter = group_.waiter(deadline.earlier(Deadline::after(look)));
    waiter.until(allDone);
  }
}

void FlushAgent::leave(uint64_t number, Deadline deadline) {
  awaitEnded(number, deadline);
  failpoint("leave");
  // Who is out of the job does not leave in peace: it is for the view to say so. And what an abort
  // ended here alone has not ended.
  if (membership_.isOver()) return;
  {
    const Step step(*this);
    // On a wire that keeps no order, or was made again, it may come before our last report, or in
    // its place. So it says what that says: how operations ended, or who has it alone would take
    // one that failed for done; and what we reported for, which is what we are in.
    leaveReport_ = encodeFlushReport(soFar(reportedFor_));  // [gone]
    tellAll(MessageKind::kLeft, leaveReport_);
    // From here on we take part in no flush: a report would say that we are in.
    frozen_ = false;
  }
  awaitLeaveSent(deadline);
}

// While we are here we can still be asked what a rank lacks, but nobody waits for that.
void FlushAgent::awaitLeaveSent(Deadline deadline) {
  for (;;) {
    {
      const Step step(*this);
      if (leaveUnsent_.empty() && due_.empty() && !isActing_) return;
      for (const int r : std::exchange(leaveUnsent_, {})) tell(r, MessageKind::kLeft, leaveReport_);
    }
    if (deadline.passed() || !group_.usable().ok()) return;
    group_.waiter(deadline.earlier(Deadline::after(kLookAtWords))).until([] { return false; });
  }
}

std::shared_ptr<const GroupView> FlushAgent::viewWhenIdle() const {
  std::lock_guard lock(mutex_);
  return view_;
}

FlushState FlushAgent::state() const {
  std::lock_guard lock(mutex_);
  FlushState state{.attempt = attempt_,
                   .isFrozen = frozen_,
                   .target = target_,
                   .hasReported = reported_,
                   .isBusy = busy_,
                   .viewEpoch = viewEpoch_,
                   .active = active_,
                   .ended = knownEnded_};
  if (state.isFrozen) {
    std::ranges::copy_if(active_, std::back_inserter(state.missing),
                         [&](int r) { return isMissing(r); });
  }
  for (const auto& [rank, report] : left_) state.left.push_back(rank);
  return state;
}

bool FlushAgent::isActive(int rank) const {
  std::lock_guard lock(mutex_);
  return std::ranges::binary_search(active_, rank) && !left_.contains(rank);
}

// What is known of the last operation that the rank has ended.
uint64_t FlushAgent::endedOf(int rank) const {
  if (group_.window().peerPtr(rank)) {
    return group_.endedWord(rank).load(std::memory_order_acquire);
  }
  std::lock_guard lock(mutex_);
  return knownEnded_[rank];
}

}  // namespace mooncake
