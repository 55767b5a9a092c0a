#include "membership/view_agreement.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace mooncake {
namespace {

// Longest pause between repetitions, as a multiple of the first. No budget ends them: a view that
// is never decided would stop the job.
constexpr int kMostResend = 8;

constexpr auto kMostJoins = ViewReport::kMostJoins;

Term firstTerm(const View& first) {
  Term term{.epoch = first.epoch};
  term.holders.resize(size_t(first.active.end()));
  first.active.forEach([&](int rank) { term.holders[size_t(rank)].emplace(); });
  return term;
}

}  // namespace

ViewAgreement::ViewAgreement(int self, View first, Timing timing)
    : ViewAgreement(Options{.term = firstTerm(first), .timing = timing}) {
  self_ = self;
  told_.from = self;
}

ViewAgreement::ViewAgreement(Options options)
    : id_(options.id),
      timing_(options.timing),
      admits_(options.admits),
      term_(std::move(options.term)),
      termId_(term_.id()),
      first_{term_.epoch, term_.active()},
      self_(term_.rankOf(id_).value_or(0)),
      view_(first_) {
  accusations_.resize(size_t(size()));
  reported_.resize(size_t(size()));
  if (options.asksFor) self_ = enlist(*options.asksFor, id_);
  told_.from = rankOf(self_);
  told_.isCandidate = isCandidate();
  told_.term = termId_;
  told_.epoch = term_.number == 0 ? 0 : term_.epoch;
}

ViewActions ViewAgreement::exited(const JobRanks& ranks, LastReport last, Clock::time_point now) {
  return testify(ranks, Cause::kExited, last, now);  // [exited] [certain]
}

ViewActions ViewAgreement::left(int rank, Clock::time_point now, Cause cause) {
  // Results that the leaver returned to its caller count, unlike a dead rank's. If it has
  // gone on without us, it stays suspected (received() saw to that), and we need a quorum to go on
  // without it.
  if (over_ || !isKnown(rank) || !isHere(rank)) return {};
  return testify({rank}, cause, LastReport::kReceived, now);  // [left] [certain]
}

ViewActions ViewAgreement::testify(const JobRanks& ranks, Cause cause, LastReport last,
                                   Clock::time_point now) {
  if (over_) return {};
  ViewActions actions;
  if (!takesPart()) return {};
  const JobRanks members = (ranks & (view_.active | joins_)) - JobRanks{self_};
  members.forEach([&](int rank) {
    if (!gone_.contains(rank)) note({rank, cause, rankOf(self_)}, actions);
  });
  gone_ |= members;
  suspected_ -= members;
  out_ |= members;
  if (last == LastReport::kReceived) lastKnown_ |= members - unclear_;
  return conclude(std::move(actions), now);
}

ViewActions ViewAgreement::suspected(const JobRanks& ranks, Cause cause, Clock::time_point now) {
  if (over_ || !takesPart()) return {};
  ViewActions actions;
  const JobRanks members = (ranks & (view_.active | joins_)) - out_ - JobRanks{self_};
  if (members.empty()) return {};
  // Holds back all or none, also ranks that are found one after the other. If we accused only the
  // junior ranks, the senior ranks would believe it.
  const bool mayAccuseUs = cause != Cause::kRefused;
  const bool isSenior = senior(members | JobRanks{self_}) == self_;
  if (mayAccuseUs && (!isSenior || !heldBack_.empty())) {
    holdBack(members, cause, now);  // [suspected] [suspect]
  } else {
    accuse(members, cause, actions);  // [suspected] [suspect] [refused]
  }
  return conclude(std::move(actions), now);
}

ViewActions ViewAgreement::received(const ViewReport& report, Clock::time_point now) {
  const int from = report.from;
  if (over_ || from == self_ || !isKnown(from)) return {};
  const When when = termOf(report);
  const Told told = translate(report, when);
  const bool counts = when == When::kSame || when == When::kNext;
  if (!told.fits || (!takesPart() && !(counts && told.joins.contains(self_)))) return {};
  ViewActions actions;
  remember(from, told, when);  // [received] [receive]
  if (gone_.contains(from)) return {};
  if (committed_.contains(from)) {
    actions.sendTo.add(from);
    return actions;
  }
  if (auto eviction = evictionIn(report, told, when)) {  // [evicted]
    over_ = true;
    actions.evicted = std::move(*eviction);
    return actions;
  }
  if (!counts) {  // it hears how its term was closed
    actions.sendTo.add(from);
    return actions;
  }
  if (out_.contains(from)) return {};
  const bool isAhead = committed_.isSubsetOf(told.committed) &&
                       (when == When::kNext || committed_ != told.committed);
  if (when == When::kNext && !isAhead) return {};
  if (told.out().contains(self_)) {
    // The sender goes on without us, so we go on without it. The grace is for the view that
    // excludes us: if it comes, we have reported nothing that other ranks must weigh.
    return refuse(from, Cause::kExcludes, now);
  }
  const bool isUnfit =
      from >= size() && !isAhead && !(told.suspected & view_.active).isSubsetOf(out_);
  // A candidate that cannot hear a member must not cost that member its place.
  if (isUnfit) return refuse(from, Cause::kSuspects, now);
  const bool wasUndecided = isUndecided();
  const EngineId sender = idOf(from);
  const int rank = rankOf(from);
  if (!close_ && when == When::kSame) close_ = report.close;
  merge(told, actions);
  // We are in that view, so our reports agreed to what it excludes: it is committed, and we follow.
  if (when == When::kNext) {
    follow(report, told, actions);  // [heed]
  } else if (isAhead) {
    commit(told.committed, actions);  // [heed]
  }
  actions = conclude(std::move(actions), now);
  if (over_ || wasUndecided || isUndecided()) return actions;
  // The sender may have lost our last report, and we send it no other unasked.
  const bool isBehind = report.term != termId_ || report.committed != committed_ ||
                        report.out() != committed_ || !report.joins.empty();
  if (const auto number = isBehind ? numberOf(sender, rank) : std::nullopt)
    actions.sendTo.add(*number);
  return actions;
}

// Suspects a rank after a grace. A candidate of which no other rank has told us joins by that, so
// that all hear of its end, and itself, too.
ViewActions ViewAgreement::refuse(int number, Cause cause, Clock::time_point now) {
  holdBack({number}, cause, now);
  if (number < size() || joins_.contains(number)) return {};
  joins_.add(number);
  return conclude({}, now);
}

// Goes on to the term of this report, and takes the report once more in the numbers of that term.
void ViewAgreement::follow(const ViewReport& report, const Told& told, ViewActions& actions) {
  const EngineId sender = idOf(report.from);
  const int rank = rankOf(report.from);
  close(told.closeOut, told.closeJoins, &report, actions);
  const auto from = numberOf(sender, rank);
  const Told again = translate(report, When::kSame);
  if (!from || !again.fits) return;
  remember(*from, again, When::kSame);
  if (!report.committed.empty()) commit(report.committed, actions);
}

ViewActions ViewAgreement::tick(Clock::time_point now) {
  if (over_ || !takesPart()) return {};
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
  if (!out_.contains(accusation.rank) && accusation.rank < size()) {
    (actions.next.empty() ? actions.accused : actions.next.back().accused).push_back(accusation);
  }
  accusations_[size_t(accusation.rank)] = accusation;
}

void ViewAgreement::holdBack(const JobRanks& ranks, Cause cause, Clock::time_point now) {
  if (heldBack_.empty()) heldUntil_ = now + timing_.grace;
  ranks.forEach([&](int rank) { heldBack_.try_emplace(rank, cause); });
}

void ViewAgreement::accuse(const JobRanks& ranks, Cause cause, ViewActions& actions) {
  ranks.forEach([&](int rank) { note({rank, cause, rankOf(self_)}, actions); });
  suspected_ |= ranks;
  out_ |= ranks;
}

// Merges the report of a rank that is active here and does not exclude us. All or nothing: a
// settled rank may be forgotten only because we take over its witness's suspicions together with
// its death.
void ViewAgreement::merge(const Told& told, ViewActions& actions) {
  for (const Accusation& theirs : told.accusations) {
    if (!out_.contains(theirs.rank) || (isCertain(theirs.cause) && !gone_.contains(theirs.rank))) {
      note(theirs, actions);
    }
  }
  joins_ |= told.joins;
  gone_ |= told.gone;
  settled_ |= told.settled;
  suspected_ |= told.suspected;  // [share]
  suspected_ -= gone_;
  out_ |= gone_;
  out_ |= suspected_;
}

// Returns whether all that this rank ever reported is part of our report.
bool ViewAgreement::isHere(int number) const {
  if (unclear_.contains(number) || !reported_[size_t(number)].isKnownHere(*this)) return false;
  const auto older = older_.find(number);
  return older == older_.end() || older->second.isKnownHere(*this);
}

// An unsettled rank still counts where a quorum is needed: before it ended, it may have helped
// another side to exclude us. Its last report may become part of our report only after its end.
void ViewAgreement::settle() {
  (lastKnown_ - settled_).forEach([&](int number) {
    if (isHere(number)) settled_.add(number);
  });
}

// Of two candidates for one rank, the one with the higher id is suspected at once, and each one for
// a rank that a living process holds. We may be that candidate ourselves.
void ViewAgreement::oneForASeat(ViewActions& actions) {
  std::map<int, int> first;  // by rank: the candidate that may get it
  JobRanks others;
  (joins_ - out_).forEach([&](int number) {
    const int rank = rankOf(number);
    const auto [chosen, isFirst] = first.try_emplace(rank, number);
    if (view_.active.contains(rank) && !out_.contains(rank)) {
      others.add(number);
    } else if (!isFirst) {
      const bool isLower = idOf(number) < idOf(chosen->second);
      others.add(isLower ? std::exchange(chosen->second, number) : number);
    }
  });
  if (others.contains(self_)) {
    over_ = true;
    const int rank = rankOf(self_);
    actions.evicted = {{rank, Cause::kSeatTaken, rank}, view_.epoch, rank};
    return;
  }
  if (!others.empty()) accuse(others, Cause::kSeatTaken, actions);
}

// Returns the one that is longest in the job; of several, the lowest rank. Candidates come last.
int ViewAgreement::senior(const JobRanks& numbers) const {
  int found = -1;
  const auto keyOf = [&](int number) {
    const bool isRank = number < size();
    const uint32_t since = isRank ? term_.holders[size_t(number)]->since : 0;
    return std::tuple(!isRank, since, rankOf(number), isRank ? EngineId{} : idOf(number));
  };
  numbers.forEach([&](int number) {
    if (found < 0 || keyOf(number) < keyOf(found)) found = number;
  });
  return found;
}

// A strict majority of `live`, or half of it including the senior.
bool ViewAgreement::isMajority(const JobRanks& rest, const JobRanks& live) const {
  const int twice = 2 * rest.count();
  return twice > live.count() || (twice == live.count() && rest.contains(senior(live)));
}

// Settled ranks need no quorum, and where no candidates are possible, certain deaths do not either.
// Any other exclusion needs one in the view without its settled ranks, and in each view that would
// follow if a set of joins was committed that we have reported.
bool ViewAgreement::mayGoOn() const {
  if ((out_ - committed_).isSubsetOf(admits_ ? settled_ : gone_)) return true;
  const JobRanks rest = all() - out_;
  if (!isMajority(rest & view_.active, view_.active - settled_)) return false;
  return std::ranges::all_of(asked_, [&](const JobRanks& joins) {
    return isMajority(rest & (view_.active | joins),
                      (view_.active | (joins - committed_)) - settled_);
  });
}

// Remembers how far it came with this set. Otherwise each of thousands of reports would look at
// thousands of ranks.
bool ViewAgreement::allReported() {
  if (counted_.out != out_ || counted_.joins != joins_) {
    counted_ = {out_, joins_};
    firstMissing_ = 0;
  }
  for (; firstMissing_ < static_cast<int>(reported_.size()); ++firstMissing_) {
    const bool isMember = view_.active.contains(firstMissing_) || joins_.contains(firstMissing_);
    const bool counts = firstMissing_ != self_ && isMember && !out_.contains(firstMissing_);
    const Said& said = reported_[size_t(firstMissing_)];
    if (counts && (said.out != out_ || said.joins != joins_)) return false;
  }
  return true;
}

void ViewAgreement::commit(const JobRanks& out, ViewActions& actions) {
  committed_ = out;
  view_ = {first_.epoch + static_cast<uint64_t>(out.count()), first_.active - out};
  actions.commit = view_;
}

ViewActions ViewAgreement::conclude(ViewActions actions, Clock::time_point now) {
  oneForASeat(actions);
  if (over_) return actions;
  if (!joins_.empty() && std::ranges::find(asked_, joins_) == asked_.end())
    asked_.push_back(joins_);
  settle();
  const bool isAlone = isCandidate() && (view_.active - out_).empty();
  if (isAlone || (isUndecided() && !mayGoOn())) {
    // Not sent to any rank: the exclusions that cost us the quorum need not cost other ranks
    // theirs.
    over_ = true;
    actions.minority = true;  // [minority]
    return actions;
  }
  if (isUndecided() && allReported()) {  // [commit]
    if (joins_.empty()) {
      commit(out_, actions);
    } else {
      close(out_, joins_, nullptr, actions);
    }
  }
  std::erase_if(heldBack_, [&](const auto& held) { return out_.contains(held.first); });

  const bool isNews = gone_ != toldSets_.gone || settled_ != toldSets_.settled ||
                      suspected_ != toldSets_.suspected || joins_ != toldSets_.joins ||
                      termId_ != told_.term;
  if (isNews)
    repeat_.emplace(Repetition::Limits{timing_.resend, kMostResend * timing_.resend}, now);
  if (isNews || (isUndecided() && repeat_->takeDue(now))) {
    // Also sent to ranks that this commit evicts, so that they know.
    actions.sendTo = all() - toldSets_.committed - gone_ - JobRanks{self_};
  } else if (committed_ != toldSets_.committed) {
    actions.sendTo = committed_ - toldSets_.committed - gone_;
  }
  if (isNews || committed_ != toldSets_.committed) describe();
  return actions;
}

// Makes told_ of our sets.
void ViewAgreement::describe() {
  toldSets_ = {committed_, gone_, settled_, suspected_, joins_, {}};
  told_ = {.from = rankOf(self_), .isCandidate = isCandidate(), .term = termId_, .close = close_};
  if (term_.number != 0) told_.epoch = term_.epoch;
  const auto ranksIn = [&](const JobRanks& numbers) {
    return joins_.empty() ? numbers : numbers & first_.active;
  };
  told_.committed = ranksIn(committed_);
  told_.gone = ranksIn(gone_);
  told_.settled = ranksIn(settled_);
  told_.suspected = ranksIn(suspected_);
  ranksIn(out_).forEach([&](int rank) { told_.accusations.push_back(accusations_[size_t(rank)]); });
  joins_.forEach([&](int number) {
    Join join{.rank = rankOf(number), .id = idOf(number)};
    if (out_.contains(number)) {
      join.state = settled_.contains(number) ? Join::State::kSettled
                   : gone_.contains(number)  ? Join::State::kGone
                                             : Join::State::kSuspected;
      join.cause = accusations_[size_t(number)].cause;
      join.by = accusations_[size_t(number)].by;
    }
    told_.joins.push_back(join);
  });
  std::ranges::sort(told_.joins, [](const Join& a, const Join& b) {
    return std::tie(a.rank, a.id) < std::tie(b.rank, b.id);
  });
}

}  // namespace mooncake
