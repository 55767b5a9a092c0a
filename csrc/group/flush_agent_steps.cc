// What an agent does under its lock: the flush itself. Whatever takes longer than an assignment is
// put off until the lock goes (FlushAgent::Step).
#include <algorithm>

#include "base/failpoint.h"
#include "base/log.h"
#include "group/flush_agent.h"
#include "group/group.h"

namespace mooncake {
namespace {

// Message, wire form:  u8 kind | report (membership/flush.cc), or u64 ended; nothing for kAsk
// A caller that is computing looks up now and then, and one that has just ended does not say so.
constexpr auto kLookAgain = std::chrono::milliseconds(1);

// "1.2": the losses and the round.
std::string nameOf(const Attempt& attempt) {
  return std::to_string(attempt.losses) + "." + std::to_string(attempt.round);
}

std::string describe(const FlushReport& report) {
  std::string text = "has ended #" + std::to_string(report.ended);
  if (report.abort != FlushReport::AbortReason::kNone)
    text += ", wants #" + std::to_string(report.ended + 1) + " to end: " + report.why.message;
  return text;
}

}  // namespace

void FlushAgent::tell(int rank, MessageKind kind, ByteView body) {
  due_.emplace_back(Message{rank, kind, Bytes(body.begin(), body.end())});
}

void FlushAgent::tellAll(MessageKind kind, ByteView body) {
  for (const int r : active_) {
    if (r != group_.rank() && !left_.contains(r)) tell(r, kind, body);
  }
}

template <typename... Words>
void FlushAgent::note(const Attempt& attempt, const Words&... words) {
  if (!logEnabled(LogLevel::kDebug)) return;
  std::ostringstream text;
  text << "group '" << group_.name() << "', flush " << nameOf(attempt) << ": ";
  (text << ... << words);
  due_.emplace_back(text.str());
}

Bytes FlushAgent::endedNow() const {
  return ByteWriter().put(endedWord_->load(std::memory_order_acquire)).take();
}

std::chrono::milliseconds FlushAgent::resendAfter() const {
  using std::chrono::milliseconds;
  return std::clamp(group_.engine().env().failureTimeout / 10, milliseconds(50), milliseconds(500));
}

bool FlushAgent::isMissing(int rank) const {
  return !reports_.contains(rank) && !left_.contains(rank);
}

// How many of our members are out of the job.
uint32_t FlushAgent::losses() const {
  return static_cast<uint32_t>(group_.size() - static_cast<int>(active_.size()));
}

void FlushAgent::join(Attempt attempt, std::string_view why) {
  if (attempt.round > kMostRounds) return failForRounds(attempt);
  if (!leaveReport_.empty()) return;
  failpoint("join");
  note(attempt, "started, for ", why);
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
  if (!std::exchange(isRepeating_, true)) repeatLater();
}

// A stamp has no room for another round. The others learn it from a report of that round.
void FlushAgent::failForRounds(Attempt attempt) {
  if (!group_.usable().ok()) return;
  group_.fail({ErrorCode::kExhausted,
               "group '" + group_.name() + "' on " + group_.nameRank(group_.rank()) +
                   " was interrupted " + std::to_string(attempt.round) +
                   " times without losing a member, by timeouts or connections that were made "
                   "again, and cannot count further. Destroy the group and make it again"});
  tellAll(MessageKind::kReport, encodeFlushReport(soFar(attempt)));
}

void FlushAgent::onTimer(Clock::duration after, void (FlushAgent::*step)()) {
  group_.engine().loop().runAt(Deadline::after(after), [weak = weak_from_this(), step] {
    const auto self = weak.lock();
    if (!self) return;
    const Step locked(*self);
    if (!self->isStopped_) ((*self).*step)();
  });
}

void FlushAgent::lookAgain() { onTimer(kLookAgain, &FlushAgent::reportIfIdle); }

void FlushAgent::reportIfIdle() {
  if (!frozen_ || reported_) return;
  report();
  if (!reported_) lookAgain();
}

void FlushAgent::repeatLater() { onTimer(resendAfter(), &FlushAgent::repeat); }

// A report is lost with its connection, where too many messages wait, and where a topic opens late.
// Whoever has not ours cannot decide; whoever has decided is not frozen, and has no reason to say
// anything again. So the one who lacks a report gives its own again and asks for it.
void FlushAgent::repeat() {
  isRepeating_ = frozen_;
  if (!frozen_) return;
  if (reported_) {
    for (const int r : active_) {
      if (!isMissing(r)) continue;
      note(target_, "no report of ", group_.nameRank(r), " yet: asks for it");
      tell(r, MessageKind::kRepeat, lastReport_);
    }
  }
  repeatLater();
}

void FlushAgent::report() {
  if (!frozen_ || reported_ || busy_.load(std::memory_order_acquire)) return;
  if (losses() < target_.losses) return;  // the view of this flush has not come yet
  FlushReport mine = soFar(target_);
  if (abortNumber_ == mine.ended + 1) {
    mine.abort = abortReason_;
    mine.why = why_;
  }
  reported_ = true;
  reportedFor_ = target_;
  failpoint("report");
  lastReport_ = encodeFlushReport(mine);
  note(target_, "report sent: ", group_.nameRank(mine.from), " ", describe(mine));
  reports_[group_.rank()] = std::move(mine);
  tellAll(MessageKind::kReport, lastReport_);
  decide();
}

// What we say of ourselves, without an abort reason.
FlushReport FlushAgent::soFar(Attempt attempt) {
  // Who has destroyed the job on its rank is not lost. The beginning misses everybody.
  const bool isLoss = (founds_ && ended() == 0) || !lostRanks().empty();
  FlushReport mine{.from = group_.rank(),
                   .attempt = attempt,
                   .ended = ended(),
                   // That somebody was lost before the group was made is no news in it.
                   .isOld = std::max(attempt_.losses, lostBefore_) < attempt.losses && isLoss};
  // Decided, but behind an operation that we have not taken over yet: it is decided again.
  while (!failed_.empty() && failed_.back().number > mine.ended) failed_.pop_back();
  mine.failed.assign(failed_.begin(), failed_.end());
  return mine;
}

void FlushAgent::decide() {
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
  const FlushDecision decision = decideFlush(reports, raises ? &lost : nullptr);
  note(target_, "decided: #", decision.next,
       decision.error.code == ErrorCode::kOk ? " starts again" : " ends with an error: ",
       decision.error.message);
  act(decision, reports);
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
  view->epoch = viewEpoch_;
  // Who has left is in if it reported for this: others may have decided before they heard that it
  // left. All go on with the same members, and the next operation misses it, on all.
  std::ranges::copy_if(active_, std::back_inserter(view->active), [&](int r) {
    const auto gone = left_.find(r);
    return gone == left_.end() || gone->second.attempt >= target_;
  });
  hasLeaver_.store(
      std::ranges::any_of(left_, [&](const auto& one) { return view->contains(one.first); }),
      std::memory_order_release);
  note(target_, "acted: #", ended, " has ended here", toTake_ ? ", the next is taken over" : "",
       "; ", view->active.size(), " of ", group_.size(), " ranks go on");
  view_ = std::move(view);
  decided_ = active_;
  attempt_ = target_;
  abortReason_ = FlushReport::AbortReason::kNone;
  abortNumber_ = 0;
  frozen_.store(false, std::memory_order_seq_cst);
  group_.window().bell().ring();
}

// Who is behind may lack what another one put: before it died, or before a connection broke. Who
// lives puts its own again. The lowest rank that surely holds the slot of a rank that is out sends
// it again.
void FlushAgent::supply(const FlushDecision& decision,
                        const std::vector<const FlushReport*>& reports) {
  for (const FlushReport* behind : reports) {
    const uint64_t number = decision.endedBy(*behind) + 1;
    if (number >= decision.next || left_.contains(behind->from)) continue;
    if (behind->from == group_.rank()) continue;
    if (!group_.window().peerPtr(behind->from)) passOn(number, group_.rank(), behind->from);
    const auto supplier = std::ranges::find_if(reports, [&](const FlushReport* report) {
      return report->ended >= number && !left_.contains(report->from);
    });
    if (supplier == reports.end() || (*supplier)->from != group_.rank()) continue;
    for (int r = 0; r < group_.size(); ++r) {
      if (!std::ranges::binary_search(active_, r)) passOn(number, r, behind->from);
    }
  }
}

// Copied here: when the lock goes, the caller may use the slot again.
void FlushAgent::passOn(uint64_t number, int of, int to) {
  if (auto copy = group_.copyPart(number, of)) due_.emplace_back(Part{to, std::move(*copy)});
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
          "it ended with an error on all ranks; the error is older than the 32 that are kept"};
}

// Since the last decision.
std::vector<int> FlushAgent::lostRanks() const {
  std::vector<int> lost;
  std::ranges::copy_if(decided_, std::back_inserter(lost), [&](int r) {
    return !std::ranges::binary_search(active_, r) && membership_.isLost(jobRanks_[r]);
  });
  return lost;
}

void FlushAgent::noteMissed(const GroupView& before, const GroupView& now) {
  RankSet missed;
  for (const int r : before.active) {
    if (!now.contains(r)) missed.add(jobRanks_[r]);
  }
  if (!missed.empty()) membership_.missed(missed);
}

Error FlushAgent::lostError() const {
  std::string who;
  const auto seen = membership_.seen();
  for (const int r : lostRanks()) {
    who += (who.empty() ? "" : ", ") + group_.nameRank(r);
    const auto why =
        std::ranges::find(seen, jobRanks_[r], [](const auto& one) { return one.accusation.rank; });
    if (why == seen.end()) continue;
    // Another rank may have told us before we saw it.
    const bool hasEnded = why->accusation.cause == Cause::kEnded;
    const std::string known = !why->detail.empty() ? why->detail
                              : hasEnded
                                  ? "its program ended without destroy_process_group()"
                                  : "rank " + std::to_string(why->accusation.by) + " says so";
    who += " (" + known + ")";
  }
  return {ErrorCode::kPeerLost, "lost " + who};
}

// -- messages --

void FlushAgent::onMessage(const EngineId& from, ByteView message) {
  const auto sender = ranksById_.find(from);
  if (sender == ranksById_.end()) return;
  const int rank = sender->second;
  ByteReader in(message);
  const auto kind = static_cast<MessageKind>(in.get<uint8_t>());
  const Step step(*this);
  switch (kind) {
    case MessageKind::kReport:
    case MessageKind::kRepeat: {
      auto report = decodeFlushReport(in, group_.size());
      if (!report.ok() || report->from != rank) {
        group_.fail({ErrorCode::kProtocol, group_.nameRank(rank) + " sent a report that does not "
                                                                   "decode: do all ranks run the "
                                                                   "same version?"});
        return;
      }
      if (kind == MessageKind::kRepeat) answer(rank, report->attempt);
      received(std::move(*report));
      return;
    }
    case MessageKind::kEnded: {
      const auto ended = in.get<uint64_t>();
      if (!in.finish("").ok()) return;
      knownEnded_[rank] = std::max(knownEnded_[rank], ended);
      group_.window().bell().ring();
      decide();
      return;
    }
    case MessageKind::kLeft: {
      auto last = decodeFlushReport(in, group_.size());
      if (!last.ok() || last->from != rank) return;
      knownEnded_[rank] = std::max(knownEnded_[rank], last->ended);
      note(newest(), group_.nameRank(rank), " has left, it ", describe(*last));
      left_[rank] = std::move(*last);
      hasLeaver_.store(true, std::memory_order_release);
      group_.interruptAll();
      decide();
      return;
    }
    case MessageKind::kAsk:
      tell(rank, MessageKind::kEnded, endedNow());
      return;
  }
}

void FlushAgent::received(FlushReport report) {
  const int rank = report.from;
  if (!std::ranges::binary_search(active_, rank) || report.attempt < newest()) return;
  if (report.attempt > newest()) join(report.attempt, "a report of " + group_.nameRank(rank));
  if (!frozen_) return;
  note(target_, "report received: ", group_.nameRank(rank), " ", describe(report));
  reports_[rank] = std::move(report);
  decide();
}

// A rank lacks what we have said for this attempt.
void FlushAgent::answer(int rank, Attempt attempt) {
  if (!leaveReport_.empty()) {
    tell(rank, MessageKind::kLeft, leaveReport_);
  } else if (!lastReport_.empty() && reportedFor_ == attempt) {
    tell(rank, MessageKind::kReport, lastReport_);
  }
}

void FlushAgent::onView(const View& view) {
  const Step step(*this);
  viewEpoch_ = view.epoch;
  std::erase_if(active_, [&](int r) { return !view.active.contains(jobRanks_[r]); });
  group_.onView({.epoch = view.epoch, .active = active_});
  group_.interruptAll();
  if (losses() > newest().losses) {
    join({losses(), 0}, "the view lost a member");  // [new-view]
  } else {
    report();
    decide();
  }
}

void FlushAgent::onOver(const Error& why) { group_.fail(why); }  // [evicted]

// Frozen as well: what was put on account of the last decision, or of this one by who has come to
// it sooner, may be lost. Who is in no operation lacks nothing; what others lack of it they get in
// the flush that they start, for they are in one.
void FlushAgent::onReconnected(int jobRank) {
  const auto found = std::ranges::find(jobRanks_, jobRank);
  if (found == jobRanks_.end()) return;
  const auto rank = static_cast<int>(found - jobRanks_.begin());
  {
    const Step step(*this);
    if (!std::ranges::binary_search(active_, rank)) return;
    if (!leaveReport_.empty()) tell(rank, MessageKind::kLeft, leaveReport_);
    if (!left_.contains(rank)) {
      tell(rank, MessageKind::kEnded, endedNow());
      if (frozen_ || isResolving_ || busy_.load(std::memory_order_acquire)) {
        join({newest().losses, newest().round + 1},
             "the connection to " + group_.nameRank(rank) + " was made again");
      } else if (!lastReport_.empty()) {
        tell(rank, MessageKind::kReport, lastReport_);
      }
    }
  }
  group_.onReconnected(rank);
}

}  // namespace mooncake
