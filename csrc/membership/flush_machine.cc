#include "membership/flush_machine.h"

#include <algorithm>
#include <sstream>

#include "base/log.h"

namespace mooncake {
namespace {

using Kind = FlushMessage::Kind;

// "1.2": losses and round.
std::string nameOf(const Attempt& attempt) {
  return std::to_string(attempt.losses) + "." + std::to_string(attempt.round);
}

std::string describe(const FlushReport& report) {
  std::string text = "has ended #" + std::to_string(report.ended);
  if (report.abort != FlushReport::AbortReason::kNone)
    text += ", wants #" + std::to_string(report.ended + 1) + " to end: " + report.why.message;
  if (report.wantsToSkip)
    text += ", wants to skip the ranks that have not begun #" + std::to_string(report.stoppedAt);
  if (report.wish != 0) text += ", wishes to move";
  if (report.closing)
    text += ", closes the series behind #" + std::to_string(report.closing->number);
  return text;
}

}  // namespace

FlushMachine::FlushMachine(Options options)
    : options_(std::move(options)),
      knownEnded_(static_cast<size_t>(options_.size)),
      leaveAfter_(static_cast<size_t>(options_.size)),
      peersReady_(static_cast<size_t>(options_.size)) {
  for (int r = 0; r < options_.size; ++r) active_.push_back(r);
  members_ = decided_ = active_;
}

// -- what is known

bool FlushMachine::isInView(int rank) const { return std::ranges::binary_search(active_, rank); }

bool FlushMachine::isActive(int rank) const { return isInView(rank) && !left_.contains(rank); }

bool FlushMachine::isMissing(int rank) const {
  return !reports_.contains(rank) && !left_.contains(rank);
}

std::vector<int> FlushMachine::missing() const {
  std::vector<int> missing;
  if (!isFrozen_) return missing;
  std::ranges::copy_if(active_, std::back_inserter(missing), [&](int r) { return isMissing(r); });
  return missing;
}

std::vector<int> FlushMachine::left() const {
  std::vector<int> ranks;
  for (const auto& [rank, report] : left_) ranks.push_back(rank);
  return ranks;
}

// Number of our members that are out of the job.
uint32_t FlushMachine::losses() const {
  return static_cast<uint32_t>(options_.size - static_cast<int>(active_.size()));
}

// True if the rank may still read the slot that operation `number` is to use.
bool FlushMachine::holdsSlot(int rank, uint64_t number) const {
  return rank != options_.rank && !left_.contains(rank) && knownEnded_[rank] + 2 < number;
}

bool FlushMachine::isSlotFree(uint64_t number) const {
  return std::ranges::none_of(active_, [&](int r) { return holdsSlot(r, number); });
}

bool FlushMachine::missesLeaver(uint64_t number) const {
  return std::ranges::any_of(left_, [&](const auto& one) {
    return one.second.ended < number && std::ranges::binary_search(members_, one.first);
  });
}

void FlushMachine::remember(uint64_t number, Error error) {
  if (errorOf(number)) return;
  const auto place = std::ranges::upper_bound(failed_, number, {}, &FailedOperation::number);
  failed_.insert(place, {number, std::move(error)});
  while (failed_.size() > kRemembered) failed_.pop_front();
}

const Error* FlushMachine::errorOf(uint64_t number) const {
  const auto found = std::ranges::find(failed_, number, &FailedOperation::number);
  return found == failed_.end() ? nullptr : &found->error;
}

Error FlushMachine::howEnded(uint64_t number) const {
  if (const Error* error = errorOf(number)) return *error;
  return {ErrorCode::kAborted,
          "it ended with an error on all ranks; the error is older than the 32 that are kept"};
}

// -- lost ranks

// Ranks lost since the last decision, with details.
std::vector<std::pair<int, std::string>> FlushMachine::newLosses() const {
  std::vector<std::pair<int, std::string>> losses;
  for (const auto& loss : lost_) {
    if (std::ranges::binary_search(decided_, loss.first)) losses.push_back(loss);
  }
  return losses;
}

Error FlushMachine::lostError() const {
  RankTexts details;
  for (const auto& [rank, detail] : newLosses()) details.add(rank, detail);
  const auto phrase = [this](const std::vector<int>& ranks, const std::string& detail) {
    return nameRanks(ranks, options_.globalRanks) + (detail.empty() ? "" : " (" + detail + ")");
  };
  return {ErrorCode::kPeerLost, "lost " + details.join(", ", phrase)};
}

// -- messages

FlushMessage FlushMachine::endedNow() const {
  FlushMessage message{.kind = Kind::kEnded, .ended = ended_, .ready = ready_};
  for (int r = 0; r < options_.size; ++r) {
    if (r == options_.rank || knownEnded_[r] >= ended_) message.alsoEnded.add(r);
    if (r == options_.rank ? leavingAfter_.has_value() : leavesWithUs(r)) message.leaving.add(r);
  }
  return message;
}

void FlushMachine::tellAll(FlushMessage message, FlushActions& actions) const {
  std::vector<int> others;
  for (const int r : active_) {
    if (r != options_.rank && !left_.contains(r)) others.push_back(r);
  }
  if (!others.empty())
    actions.emplace_back(FlushAction::Tell{std::move(others), std::move(message)});
}

template <typename... Words>
void FlushMachine::note(FlushActions& actions, const Attempt& attempt,
                        const Words&... words) const {
  if (!logEnabled(LogLevel::kDebug)) return;
  std::ostringstream text;
  text << "group '" << options_.group << "', flush " << nameOf(attempt) << ": ";
  (text << ... << words);
  actions.emplace_back(FlushAction::Note{text.str()});
}

// -- how a flush begins

FlushActions FlushMachine::parked(uint64_t number, AbortReason abort, Error why,
                                  Clock::time_point now) {
  FlushActions actions;
  if (abort != AbortReason::kNone && !(isFrozen_ && hasReported_)) {
    abortReason_ = abort;  // [abort]
    abortNumber_ = number;
    why_ = std::move(why);
  }
  if (!isFrozen_) {  // [start-round] [miss-leaver]
    join({attempt_.losses, attempt_.round + 1}, "our operation cannot go on", now, actions);
  }
  return actions;
}

void FlushMachine::join(Attempt attempt, std::string_view why, Clock::time_point now,
                        FlushActions& actions) {
  if (attempt.round > options_.mostRounds) return failForRounds(attempt, actions);
  if (leaveReport_) return;
  note(actions, attempt, "started, for ", why);
  target_ = attempt;
  hasReported_ = false;
  lastReport_.reset();
  reports_.clear();
  toTake_ = 0;  // an adoption that is decided but not done is decided again
  if (!isFrozen_)
    repeat_.emplace(Repetition::Limits{options_.resend, kMostResend * options_.resend}, now);
  isFrozen_ = true;
  actions.emplace_back(FlushAction::Freeze{});
}

// A stamp has no room for this round. The other ranks learn of it from a report for this round.
void FlushMachine::failForRounds(Attempt attempt, FlushActions& actions) {
  if (std::exchange(isOver_, true)) return;
  actions.emplace_back(FlushAction::Fail{
      {ErrorCode::kExhausted,
       "group '" + options_.group + "' on " + nameRank(options_.rank) + " was interrupted " +
           std::to_string(attempt.round) +
           " times without losing a member, by timeouts or connections that were made "
           "again, and cannot count further. Destroy the group and make it again"}});
  tellAll({.kind = Kind::kReport, .report = soFar(attempt)}, actions);
}

FlushActions FlushMachine::viewed(const FlushView& view, Clock::time_point now) {
  FlushActions actions;
  viewEpoch_ = view.epoch;
  active_ = view.active;
  for (const auto& [rank, detail] : view.losses) lost_.try_emplace(rank, detail);
  if (losses() > newest().losses) {
    join({losses(), 0}, "the view lost a member", now, actions);  // [new-view]
  } else {
    decide(actions);
  }
  return actions;
}

// Starts a round also if this rank is frozen: data that ranks supply after a decision may be lost.
// A rank that decided this flush sooner may have supplied some. A rank in no operation lacks
// nothing. A rank that lacks data from it is in an operation and starts a flush itself.
FlushActions FlushMachine::reconnected(int rank, bool isInOperation, Clock::time_point now) {
  FlushActions actions;
  if (!isInView(rank)) return actions;
  const auto tell = [&](FlushMessage message) {
    actions.emplace_back(FlushAction::Tell{{rank}, std::move(message)});
  };
  if (leaveReport_) tell({.kind = Kind::kLeft, .report = *leaveReport_});
  if (left_.contains(rank)) return actions;
  tell(endedNow());
  if (isFrozen_ || isInOperation) {
    join({newest().losses, newest().round + 1},
         "the connection to " + nameRank(rank) + " was made again", now, actions);
  } else if (lastReport_) {
    tell({.kind = Kind::kReport, .report = *lastReport_});
  }
  return actions;
}

// -- the report of this rank

FlushActions FlushMachine::stopped() {
  FlushActions actions;
  if (!wantsReport()) return actions;
  heedLeavers(actions);
  FlushReport mine = soFar(target_);
  if (abortNumber_ == mine.ended + 1) {
    mine.abort = abortReason_;
    mine.why = why_;
  }
  hasReported_ = true;  // [report]
  reportedFor_ = target_;
  note(actions, target_, "report sent: ", nameRank(mine.from), " ", describe(mine));
  lastSaid_ = {mine.stoppedAt, mine.hasBegun, mine.wantsToSkip, mine.ready, mine.wish};
  lastReport_ = reports_[options_.rank] = mine;
  tellAll({.kind = Kind::kReport, .report = std::move(mine)}, actions);
  decide(actions);
  return actions;
}

// Operations that ended on a leaver end here the same way, because the leaver has acted on a
// decision of all. If a view excludes the leaver by now, no decision considers its report.
void FlushMachine::heedLeavers(FlushActions& actions) {
  const uint64_t before = ended_;
  for (const auto& [rank, last] : left_) {
    for (const FailedOperation& one : last.failed) {
      if (one.number > ended_) remember(one.number, one.error);
    }
    if (last.closing && !close_) closes(*last.closing);
  }
  while (errorOf(ended_ + 1)) ++ended_;  // [heed-leaver]
  if (ended_ != before) actions.emplace_back(FlushAction::End{ended_});
}

// Our report for this attempt, without an abort reason.
FlushReport FlushMachine::soFar(Attempt attempt) {
  // A rank that destroyed the job on its side is no loss. The founding operation misses every rank.
  const bool isLoss = (options_.founds && ended_ == 0) || !newLosses().empty();
  // A loss from before the group was made is not new to the group.
  const bool isNews = std::max(attempt_.losses, options_.lostBefore) < attempt.losses;
  FlushReport mine{
      .from = options_.rank, .attempt = attempt, .ended = ended_, .isOld = isNews && isLoss};
  // Errors of operations behind one that we have yet to adopt: these are decided again.
  while (!failed_.empty() && failed_.back().number > mine.ended) failed_.pop_back();
  mine.failed.assign(failed_.begin(), failed_.end());
  mine.skipping.assign(skipping_.begin(), skipping_.end());
  mine.stoppedAt = ended_ + 1;
  mine.hasBegun = begun_ == mine.stoppedAt;
  mine.wantsToSkip = mine.hasBegun && skips_ == mine.stoppedAt;
  mine.ready = ready_;
  mine.wish = wish_;
  mine.closing = close_;
  return mine;
}

FlushActions FlushMachine::caughtUp() {
  FlushActions actions;
  // The next operations have ended, too, if we know their errors already.
  while (errorOf(ended_ + 1)) ++ended_;
  toTake_ = 0;
  actions.emplace_back(FlushAction::End{ended_});
  tellAll(endedNow(), actions);
  return actions;
}

// -- how a rank leaves

bool FlushMachine::hasHeardOf(int rank) const {
  return rank == options_.rank || knownEnded_[rank] >= ended_ || !isActive(rank) ||
         gone_.contains(rank);
}

bool FlushMachine::leavesWithUs(int rank) const {
  return gone_.contains(rank) || (leaveAfter_[rank] != 0 && leaveAfter_[rank] == ended_);
}

bool FlushMachine::doAllLeave() const {
  return std::ranges::all_of(active_, [&](int r) {
    if (r == options_.rank || leavesWithUs(r)) return true;
    const auto left = left_.find(r);
    return left != left_.end() && left->second.ended <= ended_;
  });
}

FlushActions FlushMachine::leaving(uint64_t number) {
  FlushActions actions;
  leavingAfter_ = number;
  passOn(actions);
  return actions;
}

// The order of the ranks is the order of the last attempt: it is the same on all ranks that ended
// the operation in it. A rank whose order differs is asked (FlushAgent::awaitEnded).
void FlushMachine::passOn(FlushActions& actions) {
  const auto self = std::ranges::find(members_, options_.rank);
  if (!leavingAfter_ || leaveReport_ || ended_ < *leavingAfter_ || self == members_.end()) return;
  const size_t size = members_.size(), place = size_t(self - members_.begin());
  for (; size_t(1) << rounds_ < size; ++rounds_) {
    const size_t span = size_t(1) << rounds_;
    for (size_t back = 1; back < span; ++back) {
      if (!hasHeardOf(members_[(place + size - back) % size])) return;
    }
    const int next = members_[(place + span) % size];
    if (isActive(next)) actions.emplace_back(FlushAction::Tell{{next}, endedNow()});
  }
}

// Without order on the wire, or after a reconnect, the leave report may arrive before our last
// report or in its place. So it repeats that report. It says how operations ended: a receiver of
// the leave report alone would take a failed operation for a good one. It names the attempt that we
// last reported for, because we are a member up to that attempt.
FlushActions FlushMachine::leave() {
  FlushActions actions;
  leaveReport_ = soFar(reportedFor_);  // [gone]
  if (lastSaid_.stoppedAt <= ended_) {
    leaveReport_->stoppedAt = lastSaid_.stoppedAt;
    leaveReport_->hasBegun = lastSaid_.hasBegun;
    leaveReport_->wantsToSkip = lastSaid_.wantsToSkip;
  }
  // Another rank may have decided with the last report.
  leaveReport_->ready = lastSaid_.ready;
  leaveReport_->wish = lastSaid_.wish;
  std::vector<int> others;
  // Ranks that leave with us have heard from us, or from ranks that we have told.
  const bool areTold = leavingAfter_ && ended_ >= *leavingAfter_ &&
                       std::ranges::all_of(active_, [&](int r) { return hasHeardOf(r); });
  for (const int r : active_) {
    if (r != options_.rank && !left_.contains(r) && !(areTold && leavesWithUs(r)))
      others.push_back(r);
  }
  if (!others.empty()) {
    actions.emplace_back(
        FlushAction::Tell{std::move(others), {.kind = Kind::kLeft, .report = *leaveReport_}});
  }
  // From now on this rank takes part in no flush: a report would count it as a member.
  isFrozen_ = false;
  repeat_.reset();
  asking_.reset();
  return actions;
}

// The leave report alone does not name the ranks that have ended the operation, too. A member may
// know of them from this rank only.
std::vector<FlushMessage> FlushMachine::lastWords() const {
  if (!leaveReport_) return {};
  return {{.kind = Kind::kLeft, .report = *leaveReport_}, endedNow()};
}

// A report is lost if its connection breaks, if too many messages wait, or if a topic opens late. A
// rank that lacks our report cannot decide. A rank that has decided is not frozen and resends
// nothing by itself. So a rank that lacks a report asks for it, and sends its own again.
FlushActions FlushMachine::tick(Clock::time_point now) {
  FlushActions actions;
  askTheUnready(now, actions);
  if (!repeat_ || !repeat_->takeDue(now) || !hasReported_) return actions;
  std::vector<int> askFor = missing();
  if (askFor.empty()) return actions;
  for (const int r : askFor)
    note(actions, target_, "no report of ", nameRank(r), " yet: asks for it");
  actions.emplace_back(
      FlushAction::Tell{std::move(askFor), {.kind = Kind::kRepeat, .report = *lastReport_}});
  return actions;
}

FlushActions FlushMachine::askForSlot(uint64_t number) const {
  std::vector<int> holders;
  std::ranges::copy_if(active_, std::back_inserter(holders),
                       [&](int r) { return holdsSlot(r, number); });
  FlushActions actions;
  if (!holders.empty())
    actions.emplace_back(FlushAction::Tell{std::move(holders), {.kind = Kind::kAsk}});
  return actions;
}

// -- messages of other ranks

FlushActions FlushMachine::received(int from, const FlushMessage& message, Clock::time_point now) {
  FlushActions actions;
  switch (message.kind) {
    case Kind::kRepeat:
      answer(from, message.report.attempt, actions);
      hear(message.report, now, actions);
      break;
    case Kind::kReport:
      hear(message.report, now, actions);
      break;
    case Kind::kEnded:
      peerHasEnded(from, message.ended);
      message.alsoEnded.forEach([&](int r) { peerHasEnded(r, message.ended); });
      message.leaving.forEach(
          [&](int r) { leaveAfter_[r] = std::max(leaveAfter_[r], message.ended); });
      peersReady_[from] = message.ready;
      passOn(actions);
      actions.emplace_back(FlushAction::LookUp{});
      break;
    case Kind::kLeft:
      peerHasEnded(from, message.report.ended);
      note(actions, newest(), nameRank(from), " has left, it ", describe(message.report));
      left_[from] = message.report;
      actions.emplace_back(FlushAction::Interrupt{});
      decide(actions);
      break;
    case Kind::kAsk:
      actions.emplace_back(FlushAction::Tell{{from}, endedNow()});
      break;
  }
  return actions;
}

void FlushMachine::hear(const FlushReport& report, Clock::time_point now, FlushActions& actions) {
  if (!isInView(report.from) || report.attempt < newest()) return;
  if (report.attempt > newest()) {
    join(report.attempt, "a report of " + nameRank(report.from), now, actions);  // [join]
  }
  if (!isFrozen_ || report.attempt != target_) return;
  note(actions, target_, "report received: ", nameRank(report.from), " ", describe(report));
  reports_[report.from] = report;
  peersReady_[report.from] = report.ready;
  decide(actions);
}

// Repeats our report for this attempt, or our leave report, to a rank that lacks it.
void FlushMachine::answer(int rank, Attempt attempt, FlushActions& actions) const {
  if (leaveReport_) {
    actions.emplace_back(FlushAction::Tell{{rank}, {.kind = Kind::kLeft, .report = *leaveReport_}});
  } else if (lastReport_ && lastReport_->attempt == attempt) {
    actions.emplace_back(
        FlushAction::Tell{{rank}, {.kind = Kind::kReport, .report = *lastReport_}});
  }
}

// -- the decision

void FlushMachine::decide(FlushActions& actions) {
  if (!isFrozen_ || !hasReported_) return;
  if (std::ranges::any_of(active_, [&](int r) { return isMissing(r); })) return;
  if (const auto later = laterFlushOfLeaver())
    return join(*later, "a leaver's report", {}, actions);
  Reports reports;
  for (const int r : active_) {
    const auto [report, isNew] = reports_.try_emplace(r);
    if (isNew) {
      report->second = left_[r];
      // Its last report was for an earlier flush: its claims and its wish do not count now.
      if (report->second.attempt != target_) {
        report->second.stoppedAt = report->second.ended + 1;
        report->second.hasBegun = report->second.wantsToSkip = false;
        report->second.wish = 0;
        report->second.hasLeft = true;
      }
      report->second.attempt = target_;
    }
    reports.push_back(&report->second);
  }
  const bool isFounding = options_.founds && std::ranges::all_of(reports, [](const auto* report) {
                            return report->ended == 0;
                          });
  const bool raises = options_.raises || isFounding;
  Error lost = raises ? lostError() : Error();
  if (isFounding) lost.message += " before the job had begun";
  const FlushDecision decision = decideFlush(reports, raises ? &lost : nullptr);  // [decide]
  note(actions, target_, "decided: #", decision.next,
       decision.error.code == ErrorCode::kOk ? " starts again" : " ends with an error: ",
       decision.error.message);
  if (decision.close)  // [closes]
    note(actions, target_, "decided: the series closes behind #", decision.close->number);
  act(decision, reports, actions);
}

void FlushMachine::act(const FlushDecision& decision, const Reports& reports,
                       FlushActions& actions) {
  const FlushReport& mine = reports_[options_.rank];
  for (const FailedOperation& one : decision.failed) {
    if (one.number > mine.ended) remember(one.number, one.error);
  }
  if (const Error* error = decision.errorOf(decision.next)) remember(decision.next, *error);
  // Ends operations also for a caller that is away: it learns the result when it calls.
  ended_ = decision.endedBy(mine);  // [act]
  actions.emplace_back(FlushAction::End{ended_});
  first_ = {};
  for (const SkippingOperation& one : decision.skipping) {
    if (one.number > mine.ended && one.number <= ended_) rememberSkip(one);
    if (one.number == ended_ + 1) first_ = one;
  }
  const bool isBehind = ended_ + 1 < decision.next;
  toTake_ = isBehind && begun_ == ended_ + 1 ? ended_ + 1 : 0;
  for (const FlushReport* report : reports)
    knownEnded_[report->from] = std::max(knownEnded_[report->from], decision.endedBy(*report));
  supply(decision, reports, actions);

  // A rank that left still counts if it reported for this flush, because other ranks may have
  // decided before its leave report arrived. All go on with the same members, and all miss the
  // leaver in the next operation.
  members_.clear();
  std::ranges::copy_if(active_, std::back_inserter(members_), [&](int r) {
    const auto gone = left_.find(r);
    return gone == left_.end() || gone->second.attempt >= target_;
  });
  GroupRanks members;
  for (const int r : members_) members.add(r);
  if (!isBehind && !(members & decision.leftOut).empty())
    first_ = {decision.next, members - decision.leftOut, members & decision.leftOut};
  note(actions, target_, "acted: #", ended_, " has ended here",
       toTake_ ? ", this rank adopts the next" : "", "; ", members_.size(), " of ", options_.size,
       " ranks go on", first_.number ? ", the next runs without some of them" : "");
  if (decision.close) closes(*decision.close);
  decided_ = active_;
  attempt_ = target_;
  abortReason_ = AbortReason::kNone;
  abortNumber_ = 0;
  isFrozen_ = false;
  repeat_.reset();
  actions.emplace_back(FlushAction::GoOn{attempt_, viewEpoch_, members_, first_});
}

// A rank that is behind may lack data that another rank put before it died or before a connection
// broke. Each living rank puts its own part again. The lowest rank that certainly still holds the
// slot of a rank that is out sends that part again.
void FlushMachine::supply(const FlushDecision& decision, const Reports& reports,
                          FlushActions& actions) const {
  for (const FlushReport* behind : reports) {
    const uint64_t number = decision.endedBy(*behind) + 1;
    if (number >= decision.next || left_.contains(behind->from)) continue;
    if (number != behind->ended + 1 || !behind->hasBegun) continue;  // it was left out
    if (behind->from == options_.rank) continue;
    actions.emplace_back(FlushAction::Supply{number, options_.rank, behind->from});
    const auto supplier = std::ranges::find_if(reports, [&](const FlushReport* report) {
      return report->ended >= number && !left_.contains(report->from);
    });
    if (supplier == reports.end() || (*supplier)->from != options_.rank) continue;
    for (int r = 0; r < options_.size; ++r) {
      if (!isInView(r)) actions.emplace_back(FlushAction::Supply{number, r, behind->from});
    }
  }
}

}  // namespace mooncake
