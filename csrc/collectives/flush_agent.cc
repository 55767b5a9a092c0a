#include "collectives/flush_agent.h"

#include <algorithm>

#include "base/failpoint.h"
#include "collectives/group.h"

namespace mooncake {
namespace {

// Message, wire form:  u8 kind | report (membership/flush.cc), or u64 ended; nothing for kAsk
constexpr uint64_t kMostRounds = (1 << kStampRoundBits) - 1;
// A caller that is computing looks up now and then, and one that has just ended does not say so.
constexpr auto kLookAgain = std::chrono::milliseconds(1);
// While we leave: nobody rings when it ends an operation.
constexpr auto kLookAtWords = std::chrono::milliseconds(1);
constexpr auto kAskAgain = std::chrono::milliseconds(20);
// A member that does not report is either alive, and then it does, or the job's view loses it. This
// is for the case that neither holds.
constexpr int kBudgets = 10;  // of failure_timeout

Bytes bodyOf(uint64_t ended) { return ByteWriter().put(ended).take(); }

}  // namespace

bool GroupView::contains(int rank) const { return std::ranges::binary_search(active, rank); }

FlushAgent::FlushAgent(Group& group, Membership& membership, uint64_t door,
                       std::vector<int> jobRanks, bool raises, bool founds)
    : group_(group),
      membership_(membership),
      door_(door),
      jobRanks_(std::move(jobRanks)),
      raises_(raises),
      founds_(founds),
      endedWord_(&group.endedWord(group.rank())),
      knownEnded_(group.size()) {
  auto view = std::make_shared<GroupView>();
  for (int r = 0; r < group.size(); ++r) {
    view->active.push_back(r);
    if (const auto& peer = membership_.peer(jobRanks_[r])) ranksById_[peer->id] = r;
  }
  active_ = view->active;
  view_ = std::move(view);
}

// In this order: what is answered to a message may be lost with its connection, and then we must be
// told of that.
void FlushAgent::start() {
  membership_.subscribe(this);
  group_.engine().openDoor(
      door_, [this](const EngineId& from, ByteView message) { onMessage(from, message); });
}

void FlushAgent::stop() {
  membership_.unsubscribe(this);
  group_.engine().closeDoor(door_);
  // A timer may still hold us for a moment, and nothing that we refer to.
  std::lock_guard lock(mutex_);
  frozen_ = false;
}

// -- what the caller does --

Status FlushAgent::beginSlowly(uint64_t number) {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
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

FlushAgent::Settled FlushAgent::settle(uint64_t number, FlushReport::Wish wish, Error why) {
  {
    std::lock_guard lock(mutex_);
    isSettling_ = true;
  }
  const Settled settled = awaitSettled(number, wish, std::move(why));
  std::lock_guard lock(mutex_);
  isSettling_ = false;
  return settled;
}

FlushAgent::Settled FlushAgent::awaitSettled(uint64_t number, FlushReport::Wish wish, Error why) {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      busy_ = false;
      if (auto usable = group_.usable(); !usable.ok())
        return {Settled::Kind::kEnded, usable, nullptr};
      if (wish != FlushReport::Wish::kNone && !(frozen_ && reported_)) {
        wish_ = wish;  // [wish]
        wishNumber_ = number;
        why_ = std::move(why);
      }
      if (frozen_) {
        report();
      } else {
        join({attempt_.epoch, attempt_.round + 1});  // [start-round]
      }
    }
    for (;;) {
      if (auto decided = awaitDecision(); !decided.ok())
        return {Settled::Kind::kEnded, decided, nullptr};
      std::lock_guard lock(mutex_);
      if (ended() >= number) return {Settled::Kind::kEnded, howEnded(number), view_};
      if (frozen_) {  // again, in the meantime
        report();
        continue;
      }
      busy_ = true;
      isTaking_ = toTake_ == number;
      return {isTaking_ ? Settled::Kind::kTake : Settled::Kind::kAgain, {}, nullptr};
    }
  }
}

Status FlushAgent::awaitSlot(uint64_t number) {
  if (number <= 2 || allBegan_ + 1 >= number) return {};
  // Without a deadline of the operation: who is waited for is copying, or is out soon.
  const auto budget = kBudgets * group_.engine().env().failureTimeout;
  Waiter waiter = group_.waiter(Deadline::after(budget));
  for (;;) {
    const auto how = waiter.until([&] { return isFrozen() || isSlotFree(number); });
    if (auto usable = group_.usable(); !usable.ok()) return usable;
    if (isFrozen()) return {ErrorCode::kInterrupted, ""};
    if (how == WaitResult::kReady) return {};
    waiter.generation = waiter.interrupt.generation();
    if (how == WaitResult::kInterrupted) continue;
    group_.fail({ErrorCode::kTimeout, "group '" + group_.name() +
                                          "': a member has not come back from operation #" +
                                          std::to_string(number - 2)});
  }
}

bool FlushAgent::isSlotFree(uint64_t number) const {
  std::lock_guard lock(mutex_);
  return std::ranges::all_of(active_, [&](int r) {
    return r == group_.rank() || left_.contains(r) || knownEnded_[r] + 2 >= number;
  });
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

  std::lock_guard lock(mutex_);
  if (std::exchange(isTaking_, false)) {
    // What came after it ended with an error that we know already.
    while (errorOf(ended() + 1)) endedWord_->store(ended() + 1, std::memory_order_release);
    tellAll(MessageKind::kEnded, bodyOf(ended()));
  }
  report();
}

void FlushAgent::leave(uint64_t number, Deadline deadline) {
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
        tell(r, MessageKind::kAsk, {});
      }
    }
    if (Clock::now() >= ask) ask = Clock::now() + kAskAgain;
    Waiter waiter = group_.waiter(deadline.earlier(Deadline::after(look)));
    waiter.until(allDone);
  }
  failpoint("leave");
  // Who is out of the job does not leave in peace: it is for the view to say so. And what an abort
  // ended here alone has not ended.
  if (membership_.isOver()) return;
  std::lock_guard lock(mutex_);
  // On a wire that keeps no order, or was made again, it may come before our last report, or in its
  // place. So it says what that says: how operations ended, or who has it alone would take one that
  // failed for done; and what we reported for, which is what we are in.
  farewell_ = encodeFlushReport(soFar(reportedFor_));  // [gone]
  tellAll(MessageKind::kLeft, farewell_);
  // From here on we take part in no flush: a report would say that we are in.
  frozen_ = false;
}

std::shared_ptr<const GroupView> FlushAgent::viewWhenIdle() const {
  std::lock_guard lock(mutex_);
  return view_;
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

// -- the flush, under the lock --

bool FlushAgent::isMissing(int rank) const {
  return !reports_.contains(rank) && !left_.contains(rank);
}

// How many of our members are out of the job.
uint32_t FlushAgent::jobEpoch() const {
  return static_cast<uint32_t>(group_.size() - static_cast<int>(active_.size()));
}

void FlushAgent::join(Attempt attempt) {
  if (attempt.round > kMostRounds) {
    group_.fail({ErrorCode::kExhausted, "group '" + group_.name() + "' was interrupted " +
                                            std::to_string(attempt.round) +
                                            " times without losing a member: make it again"});
    return;
  }
  if (!farewell_.empty()) return;
  failpoint("join");
  target_ = attempt;
  reported_ = false;
  lastReport_.clear();
  reports_.clear();
  toTake_ = 0;  // what was decided and not done yet is decided again
  frozen_.store(true, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // see begin()
  group_.interruptAll();
  report();
  if (!reported_) lookAgain();
}

void FlushAgent::lookAgain() {
  group_.engine().loop().runAt(Deadline::after(kLookAgain), [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    std::lock_guard lock(self->mutex_);
    if (!self->frozen_ || self->reported_) return;
    self->report();
    if (!self->reported_) self->lookAgain();
  });
}

void FlushAgent::report() {
  if (!frozen_ || reported_ || busy_.load(std::memory_order_acquire)) return;
  if (jobEpoch() < target_.epoch) return;  // the view of this flush has not come yet
  FlushReport mine = soFar(target_);
  if (wishNumber_ == mine.ended + 1) {
    mine.wish = wish_;
    mine.why = why_;
  }
  reported_ = true;
  reportedFor_ = target_;
  failpoint("report");
  lastReport_ = encodeFlushReport(mine);
  reports_[group_.rank()] = std::move(mine);
  tellAll(MessageKind::kReport, lastReport_);
  conclude();
}

// What we say of ourselves, without a wish.
FlushReport FlushAgent::soFar(Attempt attempt) {
  FlushReport mine{.from = group_.rank(),
                   .attempt = attempt,
                   .ended = ended(),
                   .isOld = attempt_.epoch < attempt.epoch};
  // Decided, but behind an operation that we have not taken over yet: it is decided again.
  while (!failed_.empty() && failed_.back().number > mine.ended) failed_.pop_back();
  mine.failed.assign(failed_.begin(), failed_.end());
  return mine;
}

void FlushAgent::conclude() {
  if (!frozen_ || !reported_ || std::ranges::any_of(active_, [&](int r) { return isMissing(r); }))
    return;
  failpoint("decide");
  std::vector<const FlushReport*> reports;
  for (const int r : active_) {
    const auto [report, isNew] = reports_.try_emplace(r);
    if (isNew) {
      report->second = left_[r];
      report->second.attempt = target_;
    }
    reports.push_back(&report->second);
  }
  const bool isFounding = founds_ && std::ranges::all_of(reports, [](const auto* report) {
                            return report->ended == 0;
                          });
  const bool raises = raises_ || isFounding;
  Error lost = raises ? lostError() : Error();
  if (isFounding) lost.message += " before the job had begun";
  act(decideFlush(reports, raises ? &lost : nullptr), reports);
}

void FlushAgent::act(const FlushDecision& decision,
                     const std::vector<const FlushReport*>& reports) {
  const FlushReport& mine = reports_[group_.rank()];
  for (const FailedOperation& one : decision.failed) {
    if (one.number > mine.ended) remember(one.number, one.error);
  }
  if (const Error* error = decision.errorOf(decision.next)) remember(decision.next, *error);
  // Also for a caller that is away: it is told when it calls.
  const uint64_t ended = decision.endedBy(mine);
  endedWord_->store(ended, std::memory_order_release);
  failpoint("act");
  toTake_ = ended + 1 < decision.next ? ended + 1 : 0;
  for (const FlushReport* report : reports)
    knownEnded_[report->from] = std::max(knownEnded_[report->from], decision.endedBy(*report));
  supply(decision, reports);
  failpoint("acted");

  auto view = std::make_shared<GroupView>();
  view->epoch = jobEpoch_;
  // Who has left is in if it reported for this: others may have decided before they heard that it
  // left. All go on with the same members, and the next operation misses it, on all.
  std::ranges::copy_if(active_, std::back_inserter(view->active), [&](int r) {
    const auto gone = left_.find(r);
    return gone == left_.end() || gone->second.attempt >= target_;
  });
  hasLeaver_.store(
      std::ranges::any_of(left_, [&](const auto& one) { return view->contains(one.first); }),
      std::memory_order_release);
  view_ = std::move(view);
  attempt_ = target_;
  wish_ = FlushReport::Wish::kNone;
  wishNumber_ = 0;
  frozen_.store(false, std::memory_order_seq_cst);
  group_.window().bell().ring();
}

// Who is behind may lack what another one put: before it died, or before a connection broke. Who
// lives puts its own again. The slot of a rank that is out comes from the lowest rank that has it
// for sure: from us?
void FlushAgent::supply(const FlushDecision& decision,
                        const std::vector<const FlushReport*>& reports) {
  for (const FlushReport* behind : reports) {
    const uint64_t number = decision.endedBy(*behind) + 1;
    if (number >= decision.next || left_.contains(behind->from)) continue;
    if (behind->from == group_.rank()) continue;
    if (!group_.window().peerPtr(behind->from)) group_.passOn(number, group_.rank(), behind->from);
    const auto supplier = std::ranges::find_if(reports, [&](const FlushReport* report) {
      return report->ended >= number && !left_.contains(report->from);
    });
    if (supplier == reports.end() || (*supplier)->from != group_.rank()) continue;
    failpoint("supply");
    for (int r = 0; r < group_.size(); ++r) {
      if (!std::ranges::binary_search(active_, r)) group_.passOn(number, r, behind->from);
    }
  }
}

void FlushAgent::remember(uint64_t number, Error error) {
  if (errorOf(number)) return;
  const auto place = std::ranges::upper_bound(failed_, number, {}, &FailedOperation::number);
  failed_.insert(place, {number, std::move(error)});
  while (failed_.size() > kRemembered) failed_.pop_front();
}

const Error* FlushAgent::errorOf(uint64_t number) const {
  const auto found = std::ranges::find(failed_, number, &FailedOperation::number);
  return found == failed_.end() ? nullptr : &found->error;
}

// Of an operation that did not end here by itself.
Error FlushAgent::howEnded(uint64_t number) const {
  if (const Error* error = errorOf(number)) return *error;
  return {ErrorCode::kAborted,
          "it ended with an error on all ranks, so many operations ago that nobody knows how"};
}

Error FlushAgent::lostError() const {
  std::string who;
  const auto seen = membership_.seen();
  for (const int r : view_->active) {
    if (std::ranges::binary_search(active_, r)) continue;
    who += (who.empty() ? "" : ", ") + group_.nameRank(r);
    const auto why =
        std::ranges::find(seen, jobRanks_[r], [](const auto& one) { return one.accusation.rank; });
    if (why != seen.end() && !why->detail.empty()) who += " (" + why->detail + ")";
  }
  return {ErrorCode::kPeerLost, "lost " + who};
}

// -- messages --

void FlushAgent::tell(int rank, MessageKind kind, ByteView body) {
  failpoint("tell");
  const auto& peer = membership_.peer(jobRanks_[rank]);
  const Bytes message = ByteWriter().put(static_cast<uint8_t>(kind)).putRaw(body).take();
  // Who cannot be reached is out soon, or connected anew.
  (void)group_.engine().send(*peer, door_, message);
}

void FlushAgent::tellAll(MessageKind kind, ByteView body) {
  for (const int r : active_) {
    if (r != group_.rank() && !left_.contains(r)) tell(r, kind, body);
  }
}

void FlushAgent::onMessage(const EngineId& from, ByteView message) {
  const auto sender = ranksById_.find(from);
  if (sender == ranksById_.end()) return;
  const int rank = sender->second;
  ByteReader in(message);
  const auto kind = static_cast<MessageKind>(in.get<uint8_t>());
  std::lock_guard lock(mutex_);
  switch (kind) {
    case MessageKind::kReport: {
      auto report = decodeFlushReport(in, group_.size());
      if (!report.ok() || report->from != rank) {
        group_.fail({ErrorCode::kProtocol, group_.nameRank(rank) + " sent a report that does not "
                                                                   "decode: do all ranks run the "
                                                                   "same version?"});
        return;
      }
      if (!std::ranges::binary_search(active_, rank) || report->attempt < newest()) return;
      if (report->attempt > newest()) join(report->attempt);
      if (!frozen_) return;
      reports_[rank] = std::move(*report);
      conclude();
      return;
    }
    case MessageKind::kEnded: {
      const auto ended = in.get<uint64_t>();
      if (!in.finish("").ok()) return;
      knownEnded_[rank] = std::max(knownEnded_[rank], ended);
      group_.window().bell().ring();
      conclude();
      return;
    }
    case MessageKind::kLeft: {
      auto last = decodeFlushReport(in, group_.size());
      if (!last.ok() || last->from != rank) return;
      knownEnded_[rank] = std::max(knownEnded_[rank], last->ended);
      left_[rank] = std::move(*last);
      hasLeaver_.store(true, std::memory_order_release);
      group_.interruptAll();
      conclude();
      return;
    }
    case MessageKind::kAsk:
      tell(rank, MessageKind::kEnded, bodyOf(endedWord_->load(std::memory_order_acquire)));
      return;
  }
}

void FlushAgent::onView(const View& view) {
  std::lock_guard lock(mutex_);
  jobEpoch_ = view.epoch;
  std::erase_if(active_, [&](int r) { return !view.active.contains(jobRanks_[r]); });
  group_.onView({.epoch = view.epoch, .active = active_});
  group_.interruptAll();
  if (jobEpoch() > newest().epoch) {
    join({jobEpoch(), 0});  // [new-view]
  } else {
    report();
    conclude();
  }
}

void FlushAgent::onOver(const Error& why) { group_.fail(why); }  // [evicted]

// Frozen as well: what was put on account of the last decision, or of this one by who has come to
// it sooner, may be lost. Who is in no operation lacks nothing; what others lack of it they get in
// the flush that they start, for they are in one.
void FlushAgent::onRenewed(int jobRank) {
  const auto found = std::ranges::find(jobRanks_, jobRank);
  if (found == jobRanks_.end()) return;
  const auto rank = static_cast<int>(found - jobRanks_.begin());
  {
    std::lock_guard lock(mutex_);
    if (!std::ranges::binary_search(active_, rank)) return;
    if (!farewell_.empty()) tell(rank, MessageKind::kLeft, farewell_);
    if (!left_.contains(rank)) {
      tell(rank, MessageKind::kEnded, bodyOf(ended()));
      if (frozen_ || isSettling_ || busy_.load(std::memory_order_acquire)) {
        join({newest().epoch, newest().round + 1});
      } else if (!lastReport_.empty()) {
        tell(rank, MessageKind::kReport, lastReport_);
      }
    }
  }
  group_.onRenewed(rank);
}

}  // namespace mooncake
