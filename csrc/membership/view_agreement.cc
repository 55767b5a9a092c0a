#include "membership/view_agreement.h"

#include <algorithm>
#include <utility>

namespace mooncake {

// Report, wire form, little-endian:
//   u8 version  u16 from  set committed  set gone  set unsettled  set suspected
//   for each rank that is gone or suspected, ascending: u8 cause  u16 by
// Gone ranks are usually settled, so the report lists the exceptions. A set: rank_set.h.
namespace {

constexpr uint8_t kVersion = 1;

// Longest pause between repetitions, as a multiple of the first. No budget ends them: a view that
// is never decided would stop the job.
constexpr int kMostResend = 8;

bool isCertain(Cause cause) {
  return cause == Cause::kExited || cause == Cause::kLeft || cause == Cause::kEnded;
}

bool isKnown(Cause cause) { return cause >= Cause::kExited && cause <= Cause::kEnded; }

bool isConsistent(const ViewReport& report, int ranks) {
  const JobRanks out = report.out();
  if (report.from >= ranks || out.end() > ranks || out.contains(report.from)) return false;
  if (!report.committed.isSubsetOf(out) || !report.settled.isSubsetOf(report.gone)) return false;
  for (const auto& [rank, cause, by] : report.accusations) {
    if (!isKnown(cause) || by >= ranks) return false;
    if (isCertain(cause) != report.gone.contains(rank)) return false;
  }
  return (report.gone & report.suspected).empty();
}

}  // namespace

Bytes encodeViewReport(const ViewReport& report) {
  ByteWriter out;
  out.put(kVersion).put(static_cast<uint16_t>(report.from));
  report.committed.write(out);
  report.gone.write(out);
  (report.gone - report.settled).write(out);
  report.suspected.write(out);
  for (const auto& [rank, cause, by] : report.accusations) {
    out.put(static_cast<uint8_t>(cause)).put(static_cast<uint16_t>(by));
  }
  return out.take();
}

Result<ViewReport> decodeViewReport(ByteView bytes, int ranks) {
  ByteReader in(bytes);
  const auto version = in.get<uint8_t>();
  ViewReport report;
  report.from = in.get<uint16_t>();
  report.committed = JobRanks::read(in);
  report.gone = JobRanks::read(in);
  const JobRanks unsettled = JobRanks::read(in);
  report.settled = report.gone - unsettled;
  report.suspected = JobRanks::read(in);
  report.out().forEach([&](int rank) {
    const auto cause = static_cast<Cause>(in.get<uint8_t>());
    report.accusations.push_back({rank, cause, in.get<uint16_t>()});
  });
  MOONCAKE_TRY(in.finish("view report"));
  if (version != kVersion || !unsettled.isSubsetOf(report.gone) || !isConsistent(report, ranks)) {
    return Error{ErrorCode::kProtocol,
                 "a view report does not make sense: do all ranks run the same version?"};
  }
  return report;
}

ViewAgreement::ViewAgreement(int self, View first, Timing timing)
    : self_(self), first_(std::move(first)), timing_(timing), view_(first_) {
  accusations_.resize(first_.active.end());
  reported_.resize(first_.active.end());
  told_.from = self;
}

ViewActions ViewAgreement::exited(const JobRanks& ranks, LastReport last, Clock::time_point now) {
  return testify(ranks, Cause::kExited, last, now);  // [exited] [certain]
}

ViewActions ViewAgreement::left(int rank, Clock::time_point now, Cause cause) {
  // Results that the leaver returned to its caller count, unlike a dead rank's. If it has
  // gone on without us, it stays suspected (received() saw to that), and we need a quorum to go on
  // without it.
  if (over_ || !first_.active.contains(rank) || !reported_[rank].isSubsetOf(out_)) return {};
  return testify({rank}, cause, LastReport::kReceived, now);  // [left] [certain]
}

ViewActions ViewAgreement::testify(const JobRanks& ranks, Cause cause, LastReport last,
                                   Clock::time_point now) {
  if (over_) return {};
  ViewActions actions;
  const JobRanks members = (ranks & view_.active) - JobRanks{self_};
  members.forEach([&](int rank) {
    if (!gone_.contains(rank)) note({rank, cause, self_}, actions);
  });
  gone_ |= members;
  suspected_ -= members;
  out_ |= members;
  if (last == LastReport::kReceived) lastKnown_ |= members;
  return conclude(std::move(actions), now);
}

ViewActions ViewAgreement::suspected(const JobRanks& ranks, Cause cause, Clock::time_point now) {
  if (over_) return {};
  ViewActions actions;
  const JobRanks members = (ranks & view_.active) - out_ - JobRanks{self_};
  if (members.empty()) return {};
  // Holds back all or none, also ranks that are found one after the other. If we accused only the
  // higher ranks, the lower ranks would believe it.
  const bool mayAccuseUs = cause != Cause::kRefused;
  if (mayAccuseUs && (members.lowest() < self_ || !heldBack_.empty())) {
    holdBack(members, cause, now);  // [suspected] [suspect]
  } else {
    accuse(members, cause, actions);  // [suspected] [suspect] [refused]
  }
  return conclude(std::move(actions), now);
}

ViewActions ViewAgreement::received(const ViewReport& report, Clock::time_point now) {
  const int from = report.from;
  const JobRanks theirOut = report.out();
  if (over_ || from == self_ || !first_.active.contains(from)) return {};
  if (!theirOut.isSubsetOf(first_.active)) return {};
  ViewActions actions;
  if (!theirOut.isSubsetOf(reported_[from])) {  // [received] [receive]
    reported_[from] |= theirOut;
    firstMissing_ = std::min(firstMissing_, from);  // an older report of it was counted
  }
  if (gone_.contains(from)) return {};
  if (!view_.active.contains(from)) {
    actions.sendTo.add(from);
    return actions;
  }
  if (report.committed.contains(self_)) {  // [evicted]
    over_ = true;
    const auto why = std::find_if(report.accusations.begin(), report.accusations.end(),
                                  [&](const Accusation& theirs) { return theirs.rank == self_; });
    actions.evicted = {*why, first_.epoch + report.committed.count(), from};
    return actions;
  }
  if (out_.contains(from)) return {};
  if (theirOut.contains(self_)) {
    // The sender goes on without us, so we go on without it. The grace is for the view that
    // excludes us: if it comes, we have reported nothing that other ranks must weigh.
    holdBack({from}, Cause::kExcludes, now);
    return {};
  }
  const bool wasUndecided = isUndecided();
  merge(report, actions);
  actions = conclude(std::move(actions), now);
  // The sender may have lost our last report, and we send it no other unasked.
  const bool isBehind = report.committed != committed_ || theirOut != committed_;
  if (!over_ && !wasUndecided && !isUndecided() && isBehind) actions.sendTo.add(from);
  return actions;
}

ViewActions ViewAgreement::tick(Clock::time_point now) {
  if (over_) return {};
  ViewActions actions;
  if (!heldBack_.empty() && now >= heldUntil_) {
    // All together, as suspected() explains.
    for (const auto& [rank, cause] : heldBack_) accuse({rank}, cause, actions);  // [give-up-on]
  }
  return conclude(std::move(actions), now);  // [tick]
}

std::optional<Clock::time_point> ViewAgreement::nextTick() const {
  std::optional<Clock::time_point> next;
  if (over_) return next;
  if (isUndecided() && repeat_) next = repeat_->next();
  if (!heldBack_.empty()) next = next ? std::min(*next, heldUntil_) : heldUntil_;
  return next;
}

void ViewAgreement::note(const Accusation& accusation, ViewActions& actions) {
  if (!out_.contains(accusation.rank)) actions.accused.push_back(accusation);
  accusations_[accusation.rank] = accusation;
}

void ViewAgreement::holdBack(const JobRanks& ranks, Cause cause, Clock::time_point now) {
  if (heldBack_.empty()) heldUntil_ = now + timing_.grace;
  ranks.forEach([&](int rank) { heldBack_.try_emplace(rank, cause); });
}

void ViewAgreement::accuse(const JobRanks& ranks, Cause cause, ViewActions& actions) {
  ranks.forEach([&](int rank) { note({rank, cause, self_}, actions); });
  suspected_ |= ranks;
  out_ |= ranks;
}

// Merges the report of a rank that is active here and does not exclude us. All or nothing: a
// settled rank may be forgotten only because we take over its witness's suspicions together with
// its death.
void ViewAgreement::merge(const ViewReport& report, ViewActions& actions) {
  for (const Accusation& theirs : report.accusations) {
    if (!out_.contains(theirs.rank) || (isCertain(theirs.cause) && !gone_.contains(theirs.rank))) {
      note(theirs, actions);
    }
  }
  gone_ |= report.gone;
  settled_ |= report.settled;
  suspected_ |= report.suspected;  // [share]
  suspected_ -= gone_;
  out_ |= gone_;
  out_ |= suspected_;
  // We are in that view, so our reports agreed to what it excludes: it is committed, and we follow.
  if (committed_.isSubsetOf(report.committed) && committed_ != report.committed) {
    commit(report.committed, actions);  // [heed]
  }
}

// An unsettled rank still counts where a quorum is needed: before it ended, it may have helped
// another side to exclude us. Its last report may become part of our report only after its end.
void ViewAgreement::settle() {
  (lastKnown_ - settled_).forEach([&](int rank) {
    if (reported_[rank].isSubsetOf(out_)) settled_.add(rank);
  });
}

// Certain deaths need no quorum. If an exclusion is only suspected, the rest needs a strict
// majority of the last view without its settled ranks, or half of it including the lowest.
bool ViewAgreement::mayGoOn() const {
  if ((out_ - committed_).isSubsetOf(gone_)) return true;
  const JobRanks live = view_.active - settled_;
  const JobRanks rest = view_.active - out_;
  const int twice = 2 * rest.count();
  return twice > live.count() || (twice == live.count() && rest.contains(live.lowest()));
}

// Remembers how far it came with this set. Otherwise each of thousands of reports would look at
// thousands of ranks.
bool ViewAgreement::allReported() {
  if (counted_ != out_) {
    counted_ = out_;
    firstMissing_ = 0;
  }
  for (; firstMissing_ < static_cast<int>(reported_.size()); ++firstMissing_) {
    const bool counts = firstMissing_ != self_ && view_.active.contains(firstMissing_) &&
                        !out_.contains(firstMissing_);
    if (counts && reported_[firstMissing_] != out_) return false;
  }
  return true;
}

void ViewAgreement::commit(const JobRanks& out, ViewActions& actions) {
  committed_ = out;
  view_ = {first_.epoch + static_cast<uint64_t>(out.count()), first_.active - out};
  actions.commit = view_;
}

ViewActions ViewAgreement::conclude(ViewActions actions, Clock::time_point now) {
  settle();
  if (isUndecided() && !mayGoOn()) {
    // Not sent to any rank: the exclusions that cost us the quorum need not cost other ranks
    // theirs.
    over_ = true;
    actions.minority = true;  // [minority]
    return actions;
  }
  if (isUndecided() && allReported()) commit(out_, actions);  // [commit]
  std::erase_if(heldBack_, [&](const auto& held) { return out_.contains(held.first); });

  const bool isNews =
      gone_ != told_.gone || settled_ != told_.settled || suspected_ != told_.suspected;
  if (isNews)
    repeat_.emplace(Repetition::Limits{timing_.resend, kMostResend * timing_.resend}, now);
  if (isNews || (isUndecided() && repeat_->takeDue(now))) {
    // Also sent to ranks that this commit evicts, so that they know.
    actions.sendTo = first_.active - told_.committed - gone_ - JobRanks{self_};
  } else if (committed_ != told_.committed) {
    actions.sendTo = committed_ - told_.committed - gone_;
  }
  if (isNews || committed_ != told_.committed) {
    told_ = {self_, committed_, gone_, settled_, suspected_, {}};
    out_.forEach([&](int rank) { told_.accusations.push_back(accusations_[rank]); });
  }
  return actions;
}

}  // namespace mooncake
