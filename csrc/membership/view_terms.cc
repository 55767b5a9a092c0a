// Terms of a ViewAgreement: candidates, and how one term follows another.
#include <algorithm>
#include <tuple>
#include <utility>

#include "membership/view_agreement.h"

namespace mooncake {

bool ViewAgreement::mayAdmit(int rank) const {
  if (over_ || isCandidate() || rank < 0 || rank >= size()) return false;
  if (view_.active.contains(rank) || candidates_.size() >= ViewReport::kMostJoins) return false;
  bool isFree = true;
  (joins_ - out_).forEach([&](int number) { isFree = isFree && rankOf(number) != rank; });
  return isFree;
}

ViewActions ViewAgreement::admit(int rank, const EngineId& id, Clock::time_point now) {
  if (!mayAdmit(rank)) return {};
  joins_.add(enlist(rank, id));  // [admit]
  return conclude({}, now);
}

bool ViewAgreement::isKnown(int number) const {
  if (number < size()) return first_.active.contains(number);
  return number < size() + static_cast<int>(candidates_.size());
}

std::optional<int> ViewAgreement::numberOf(const EngineId& id, int rank) const {
  if (rank < 0 || rank >= size()) return std::nullopt;
  const auto& holder = term_.holders[size_t(rank)];
  if (holder && holder->id == id) return rank;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    if (candidates_[i].rank == rank && candidates_[i].id == id) return size() + int(i);
  }
  return std::nullopt;
}

const EngineId& ViewAgreement::idOf(int number) const {
  return number < size() ? term_.holders[size_t(number)]->id
                         : candidates_[size_t(number - size())].id;
}

int ViewAgreement::rankOf(int number) const {
  return number < size() ? number : candidates_[size_t(number - size())].rank;
}

int ViewAgreement::enlist(int rank, const EngineId& id) {
  for (size_t i = 0; i < candidates_.size(); ++i) {
    if (candidates_[i].rank == rank && candidates_[i].id == id) return size() + int(i);
  }
  if (candidates_.size() >= ViewReport::kMostJoins) return -1;
  candidates_.push_back({rank, id});
  reported_.resize(size_t(size()) + candidates_.size());
  accusations_.resize(reported_.size());
  return size() + int(candidates_.size()) - 1;
}

// Returns whether the terms of this report and of ours follow on the same one.
bool ViewAgreement::isSibling(const ViewReport& report) const {
  return report.term.number == termId_.number && report.close && close_ &&
         report.close->digest == close_->digest;
}

ViewAgreement::When ViewAgreement::termOf(const ViewReport& report) const {
  const TermId& theirs = report.term;
  if (theirs == termId_) return When::kSame;
  if (isSibling(report)) return report.epoch > term_.epoch ? When::kNext : When::kOlder;
  if (theirs.number > termId_.number) {
    const bool follows = theirs.number == termId_.number + 1 && report.close &&
                         report.close->digest == termId_.digest;
    return follows ? When::kNext : When::kBeyond;
  }
  const bool isBefore = theirs.number + 1 == termId_.number && close_;
  return isBefore && close_->digest == theirs.digest ? When::kOlder : When::kForeign;
}

// Returns whether a rank of an older term is held by the same process in ours.
bool ViewAgreement::keeps(const ViewReport& older, int rank) const {
  if (isSibling(older)) {
    for (const Close::Newcomer& one : older.close->newcomers) {
      const auto& holder = term_.holders[size_t(rank)];
      if (one.rank == rank && !one.isOut) return holder && holder->id == one.id;
    }
  }
  return std::ranges::find(close_->out, rank, &Accusation::rank) == close_->out.end();
}

// Of an older term, only the ranks and candidates are left over that are in this one.
ViewAgreement::Told ViewAgreement::translate(const ViewReport& report, When when) {
  Told told;
  if (when == When::kBeyond || when == When::kForeign) return told;
  if (when == When::kSame) {
    told = {report.committed, report.gone, report.settled,
            report.suspected, {},          report.accusations};
    told.fits = report.out().isSubsetOf(first_.active);
    translateJoins(report, when, told);
    return told;
  }
  std::map<int, int> entered;  // by rank: newcomers of the next term, which are candidates here
  if (when == When::kNext) {
    translateClose(*report.close, told);
    told.closeJoins.forEach([&](int number) {
      if (!told.closeOut.contains(number)) entered[rankOf(number)] = number;
    });
  }
  if (!told.fits) return told;
  const auto map = [&](const JobRanks& ranks, JobRanks& numbers) {
    ranks.forEach([&](int rank) {
      const auto newcomer = entered.find(rank);
      if (newcomer != entered.end()) return numbers.add(newcomer->second);
      if (when == When::kOlder && !keeps(report, rank)) return;
      told.fits = told.fits && first_.active.contains(rank);
      numbers.add(rank);
    });
  };
  map(report.committed, told.committed);
  map(report.gone, told.gone);
  map(report.settled, told.settled);
  map(report.suspected, told.suspected);
  for (Accusation one : report.accusations) {
    if (const auto newcomer = entered.find(one.rank); newcomer != entered.end())
      one.rank = newcomer->second;
    if (when == When::kNext) told.accusations.push_back(one);
  }
  translateJoins(report, when, told);
  return told;
}

void ViewAgreement::translateJoins(const ViewReport& report, When when, Told& told) {
  for (const Join& join : report.joins) {
    if (join.rank >= size()) return void(told.fits = false);
    const auto& holder = term_.holders[size_t(join.rank)];
    const bool hasEntered = holder && holder->id == join.id;
    const bool wasOut = when == When::kOlder &&
                        std::ranges::any_of(close_->newcomers, [&](const Close::Newcomer& one) {
                          return one.isOut && one.id == join.id;
                        });
    if (wasOut) continue;
    const int number = hasEntered ? join.rank : enlist(join.rank, join.id);
    // Too many, or a rank of this term that joins it.
    if (number < 0 || (hasEntered && when != When::kOlder)) return void(told.fits = false);
    if (!hasEntered) told.joins.add(number);
    if (join.state == Join::State::kLive) continue;
    (join.state == Join::State::kSuspected ? told.suspected : told.gone).add(number);
    if (join.state == Join::State::kSettled) told.settled.add(number);
    told.accusations.push_back({number, join.cause, join.by});
  }
}

// With which ranks out, and with which joins, a later term follows on ours.
void ViewAgreement::translateClose(const Close& close, Told& told) {
  const bool isSibling = close_ && close.digest == close_->digest;
  const JobRanks outBefore = isSibling ? close_->outRanks() : JobRanks();
  const auto goesOut = [&](int number, Accusation why) {
    told.closeOut.add(number);
    (isCertain(why.cause) ? told.gone : told.suspected).add(number);
    why.rank = number;
    told.accusations.push_back(why);
  };
  for (const Accusation& one : close.out) {
    if (outBefore.contains(one.rank)) continue;
    if (!first_.active.contains(one.rank)) return void(told.fits = false);
    goesOut(one.rank, one);
  }
  size_t shared = 0;  // newcomers that have entered our term, too
  for (const Close::Newcomer& one : close.newcomers) {
    const Accusation why{one.rank, Cause::kUnreachable, rankOf(self_)};
    const auto ours = isSibling ? std::ranges::find(close_->newcomers, one.id, &Close::Newcomer::id)
                                : std::vector<Close::Newcomer>::iterator();
    if (isSibling && ours != close_->newcomers.end()) {
      ++shared;
      if (one.isOut && !ours->isOut) goesOut(one.rank, why);
      continue;
    }
    const int number = one.rank < size() ? enlist(one.rank, one.id) : -1;
    if (number < 0) return void(told.fits = false);
    told.joins.add(number);
    told.closeJoins.add(number);
    if (one.isOut) goesOut(number, why);
  }
  told.committed = told.closeOut;
  told.fits = told.fits && (!isSibling || shared == close_->newcomers.size());
}

void ViewAgreement::remember(int from, const Told& told, When when) {
  if (when == When::kBeyond || when == When::kForeign) return unclear_.add(from);
  Said& said = when == When::kOlder ? older_[from] : reported_[size_t(from)];
  if (told.out().isSubsetOf(said.out) && told.joins.isSubsetOf(said.joins)) return;
  said.out |= told.out();
  said.joins |= told.joins;
  firstMissing_ = std::min(firstMissing_, from);  // an older report of it was counted
}

std::optional<ViewActions::Eviction> ViewAgreement::evictionIn(const ViewReport& report,
                                                               const Told& told, When when) const {
  const int rank = rankOf(self_), by = rankOf(report.from);
  // To close two terms after ours took no report of ours, so we were out in the first of them.
  if (when == When::kBeyond)
    return ViewActions::Eviction{{rank, Cause::kSilent, by}, report.epoch, by};
  // A candidate that has not heard of its joining gives up at the first word that it is out.
  const bool isOut = told.committed.contains(self_) || (!takesPart() && told.out().contains(self_));
  if (!isOut) return std::nullopt;
  Accusation why{rank, Cause::kSilent, by};
  const auto found = std::ranges::find(told.accusations, self_, &Accusation::rank);
  if (found != told.accusations.end()) why = {rank, found->cause, found->by};
  const uint64_t first = when == When::kSame ? first_.epoch : report.epoch;
  return ViewActions::Eviction{why, first + report.committed.count(), by};
}

// The next term: this one and the joins, without the ranks that are out. What this rank has reported
// beyond that, it keeps. `theirs`: the report of the rank that it follows; null: none.
void ViewAgreement::close(const JobRanks& out, const JobRanks& joins, const ViewReport* theirs,
                          ViewActions& actions) {
  ViewActions::NextTerm next;
  next.term = {.number = theirs ? theirs->term.number : term_.number + 1,
               .epoch = first_.epoch + static_cast<uint64_t>(out.count() + joins.count()),
               .holders = term_.holders};
  Close made{.digest = termId_.digest};
  out.forEach([&](int number) {
    if (!committed_.contains(number) && !gone_.contains(number))
      next.excluded.push_back(idOf(number));
    if (number >= size()) return;
    made.out.push_back(
        {number, accusations_[size_t(number)].cause, accusations_[size_t(number)].by});
    next.term.holders[size_t(number)].reset();
  });
  std::vector<int> numbers(reported_.size(), -1);  // by number: the next one
  std::vector<Candidate> left;
  for (int number = 0; number < static_cast<int>(numbers.size()); ++number) {
    const int rank = rankOf(number);
    if (number < size()) {
      if (!out.contains(number)) numbers[size_t(number)] = number;
    } else if (joins.contains(number)) {
      made.newcomers.push_back({rank, idOf(number), out.contains(number)});
      if (out.contains(number)) continue;
      next.term.holders[size_t(rank)] = Holder{idOf(number), next.term.number};
      numbers[size_t(number)] = rank;
    } else {
      numbers[size_t(number)] = size() + static_cast<int>(left.size());
      left.push_back(candidates_[size_t(number - size())]);
    }
  }
  std::ranges::sort(made.newcomers, [](const auto& a, const auto& b) {
    return std::tie(a.rank, a.id) < std::tie(b.rank, b.id);
  });
  joins.forEach([&](int number) { heldBack_.erase(number); });
  std::erase_if(asked_, [&](JobRanks& asked) { return (asked -= joins).empty(); });
  joins_ -= joins;

  term_ = next.term;  // [close]
  termId_ = term_.id();
  close_ = theirs ? *theirs->close : std::move(made);
  first_ = {term_.epoch, term_.active()};
  committed_ = {};
  renumber(numbers, std::move(left));
  view_ = first_;
  actions.next.push_back(std::move(next));
  actions.commit = view_;
}

void ViewAgreement::renumber(const std::vector<int>& numbers, std::vector<Candidate> candidates) {
  const auto map = [&](JobRanks& set) {
    JobRanks mapped;
    set.forEach([&](int number) {
      if (numbers[size_t(number)] >= 0) mapped.add(numbers[size_t(number)]);
    });
    set = std::move(mapped);
  };
  for (JobRanks* set : {&gone_, &settled_, &suspected_, &out_, &joins_, &lastKnown_, &unclear_})
    map(*set);
  for (JobRanks& asked : asked_) map(asked);
  self_ = numbers[size_t(self_)];

  // Reports of the closed term count no more, but the last word of a rank includes them.
  std::map<int, Said> older;
  std::vector<Accusation> accusations(size_t(size()) + candidates.size());
  const auto keep = [&](int number, Said said) {
    map(said.out);
    map(said.joins);
    said.joins -= first_.active;  // candidates that have become ranks
    if (said.out.empty() && said.joins.empty()) return;
    Said& kept = older[numbers[size_t(number)]];
    kept.out |= said.out;
    kept.joins |= said.joins;
  };
  std::map<int, Cause> heldBack;
  for (int number = 0; number < static_cast<int>(numbers.size()); ++number) {
    const int next = numbers[size_t(number)];
    if (next < 0) continue;
    keep(number, reported_[size_t(number)]);
    if (const auto found = older_.find(number); found != older_.end()) keep(number, found->second);
    if (const auto held = heldBack_.find(number); held != heldBack_.end())
      heldBack.emplace(next, held->second);
    accusations[size_t(next)] = accusations_[size_t(number)];
    accusations[size_t(next)].rank = next;
  }
  older_ = std::move(older);
  heldBack_ = std::move(heldBack);
  accusations_ = std::move(accusations);
  reported_.assign(accusations_.size(), {});
  counted_ = {};
  firstMissing_ = 0;
  toldSets_ = {};
  candidates_ = std::move(candidates);
}

}  // namespace mooncake
