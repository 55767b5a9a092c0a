#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/backoff.h"
#include "base/deadline.h"
#include "membership/rank_set.h"
#include "membership/term.h"
#include "membership/view.h"
#include "membership/view_report.h"

// Agreement of a job's ranks on the active ranks, seen from one rank. Pure: events in, actions out;
// no thread and no socket, and the time comes with the event.
//
// Every rank tells all other ranks which ranks it knows to be gone and which it suspects; both
// together are out. It takes over what the other ranks report. A view is committed when every rank
// in it has reported exactly the other ranks to be out. If one of these is only suspected, the view
// also needs a quorum.
//
// Why living ranks never commit two views side by side: the reports of a rank only grow, so of two
// views with a common rank one includes the other. Two views without a common rank need two quorums
// of the same last view. Both quorums leave out gone ranks, but only settled ones. All that a
// settled rank ever reported is part of the report of the rank that counts. So a settled rank
// cannot have helped a view that the counting rank does not know of. Without a suspicion no quorum
// is needed: then all ranks of the other view are dead, and their results bind no living rank.
//
// Candidates ask for ranks that are out (docs/membership.md, section 9). Each rank also tells which
// candidates it knows, its joins. A committed set of joins closes the term: the next one has another
// roster. Inside a term, a candidate has a number from Term::size() on, which only this rank knows
// it by. All sets of ranks here may hold such numbers.
namespace mooncake {

struct ViewActions {
  struct Eviction {
    Accusation why;      // `rank` is this rank
    uint64_t epoch = 0;  // epoch of the view that excludes it
    int toldBy = 0;
  };

  // The next term has begun. `accused` above is in numbers of the term before, `commit` and `sendTo`
  // below are in those of the last one.
  struct NextTerm {
    Term term;
    // Processes that are out by this, and may live: report() goes to them, too.
    std::vector<EngineId> excluded;
    std::vector<Accusation> accused;  // as ViewActions::accused, but new since
  };

  std::vector<Accusation> accused;  // ranks that are newly out here: each is logged once
  std::vector<NextTerm> next;       // usually none, or one
  std::optional<View> commit;
  JobRanks sendTo;  // report() goes to these
  // Either one ends this rank for good: later events have no effect. The driver then says goodbye,
  // so that no rank waits for this rank's report.
  bool minority = false;
  std::optional<Eviction> evicted;
};

// The driver's duties:
//  - It publishes a report to the witnesses of our exit (the ranks of our host) before it sends it
//    to any rank. The same holds for a goodbye, which carries the last report.
//  - It gives suspected() all ranks that one look found silent at once. A rank that has gone deaf
//    then accuses all other ranks in one report, which no rank believes, instead of one after
//    the other.
//  - It gives received() only reports of the process with which the connection was made, and drops
//    reports that do not decode. It may handle many events before it sends report() once.
//  - It holds a report that says that a rank has left, until that rank's goodbye is here or a time
//    limit passes (HeldReports says why).
//  - It sends report() to a rank outside the view that gives a sign of life, to tell it the reason.
//    The same holds for a process that was a rank of an earlier term.
//  - It sets ViewReport::from to the number that the sender has here: see numberOf(). It drops the
//    report of a process without a number.
//  - It suspects a candidate to which it has no connection soon after it has heard of it.
class ViewAgreement {
 public:
  struct Timing {
    // How long an accusation is held back, see suspected(). Longer than the difference between two
    // ranks' detectors plus the travel time of a report.
    Clock::duration grace;
    Clock::duration resend;  // first pause before the report is sent again, for an undecided view
  };
  // Says whether received() was given the last report of an exited rank, or it may be lost. In both
  // cases the rank certainly said no goodbye; otherwise its results would count. A witness that
  // only saw a process end, such as a launcher, cannot know that, and suspects the rank instead.
  enum class LastReport { kReceived, kUnknown };

  struct Options {
    EngineId id{};  // of this process, a holder in `term` unless it is a candidate
    Term term;
    std::optional<int> asksFor;  // of a candidate: the rank that it asks for
    Timing timing{};
    // Candidates are possible in this job. Then a certain exit needs a quorum, too, as long as the
    // last report is unknown: its rank may have helped a candidate in that is unknown here.
    bool admits = false;
  };

  explicit ViewAgreement(Options options);
  // A job without candidates.
  ViewAgreement(int self, View first, Timing timing);

  ViewActions exited(const JobRanks& ranks, LastReport last, Clock::time_point now);
  // Call it after received() was given the report of the goodbye. A rank that said goodbye is never
  // passed to exited(), even if only its end was seen.
  ViewActions left(int rank, Clock::time_point now, Cause cause = Cause::kLeft);
  // Holds the accusation back for a grace, unless it is kRefused or we are senior to all of them and
  // no accusation is held back. If one link breaks, only one of its ends then accuses, and the
  // job loses one rank instead of two.
  ViewActions suspected(const JobRanks& ranks, Cause cause, Clock::time_point now);
  ViewActions received(const ViewReport& report, Clock::time_point now);
  ViewActions tick(Clock::time_point now);
  // When tick() has work to do if no other event comes first.
  std::optional<Clock::time_point> nextTick() const;

  // Returns whether a process may become this rank: the rank is out of the view, and no other
  // candidate asks for it.
  bool mayAdmit(int rank) const;
  // Adds a candidate that has connections to all of our view, and we to it. Call it if mayAdmit().
  ViewActions admit(int rank, const EngineId& id, Clock::time_point now);
  // Gives a candidate a number, so that its own reports are taken. It joins by them, too. Returns -1
  // if there are too many candidates.
  int enlist(int rank, const EngineId& id);

  // Returns the rank of this process, or its number while it is a candidate.
  int self() const { return self_; }
  bool isCandidate() const { return self_ >= size(); }
  // Returns whether it is a rank, or a candidate that a member has added.
  bool takesPart() const { return !isCandidate() || joins_.contains(self_); }
  const Term& term() const { return term_; }
  const View& view() const { return view_; }
  // The last report that was sent, or is to be sent now.
  const ViewReport& report() const { return told_; }

  // Returns the number of a process that holds this rank, or asks for it and is known here, or null.
  std::optional<int> numberOf(const EngineId& id, int rank) const;
  // The process of such a number, and the rank that it holds or asks for.
  const EngineId& idOf(int number) const;
  int rankOf(int number) const;
  // Numbers of the candidates that have joined, as far as is known here, and of all that are out.
  const JobRanks& joins() const { return joins_; }
  const JobRanks& out() const { return out_; }

 private:
  struct Candidate {
    int rank = 0;
    EngineId id{};
  };
  // All that a rank has reported.
  struct Said {
    JobRanks out, joins;

    bool isKnownHere(const ViewAgreement& here) const {
      return out.isSubsetOf(here.out_) && joins.isSubsetOf(here.joins_);
    }
  };
  // A report in the numbers of this term.
  struct Told {
    JobRanks committed, gone, settled, suspected, joins;
    std::vector<Accusation> accusations;
    JobRanks closeOut, closeJoins;  // of a later term: with these it follows on ours
    bool fits = true;               // false: it names more candidates than a term may have

    JobRanks out() const { return gone | suspected; }
  };
  // The term of a report, seen from ours. Of two terms that follow on the same one, the one with the
  // higher epoch is the next of the other: some ranks did in one step what others did in two.
  enum class When { kOlder, kSame, kNext, kBeyond, kForeign };

  int size() const { return term_.size(); }
  JobRanks all() const { return first_.active | joins_; }
  bool isUndecided() const { return committed_ != out_ || !joins_.empty(); }
  bool isKnown(int number) const;
  When termOf(const ViewReport& report) const;
  Told translate(const ViewReport& report, When when);
  void translateJoins(const ViewReport& report, When when, Told& told);
  void translateClose(const Close& close, Told& told);
  bool isSibling(const ViewReport& report) const;
  bool keeps(const ViewReport& older, int rank) const;
  void remember(int from, const Told& told, When when);
  std::optional<ViewActions::Eviction> evictionIn(const ViewReport& report, const Told& told,
                                                  When when) const;
  void note(const Accusation& accusation, ViewActions& actions);
  void holdBack(const JobRanks& ranks, Cause cause, Clock::time_point now);
  void accuse(const JobRanks& ranks, Cause cause, ViewActions& actions);
  ViewActions testify(const JobRanks& ranks, Cause cause, LastReport last, Clock::time_point now);
  void merge(const Told& told, ViewActions& actions);
  bool isHere(int number) const;
  ViewActions refuse(int number, Cause cause, Clock::time_point now);
  void follow(const ViewReport& report, const Told& told, ViewActions& actions);
  void settle();
  void oneForASeat(ViewActions& actions);
  int senior(const JobRanks& numbers) const;
  bool isMajority(const JobRanks& rest, const JobRanks& live) const;
  bool mayGoOn() const;
  bool allReported();
  void commit(const JobRanks& out, ViewActions& actions);
  void close(const JobRanks& out, const JobRanks& joins, const ViewReport* theirs,
             ViewActions& actions);
  void renumber(const std::vector<int>& numbers, std::vector<Candidate> candidates);
  void describe();
  ViewActions conclude(ViewActions actions, Clock::time_point now);

  const EngineId id_;
  const Timing timing_;
  const bool admits_;

  Term term_;
  TermId termId_;
  View first_;                  // of the term
  std::optional<Close> close_;  // of the term before, unless it is not known here
  int self_;

  View view_;           // first_ without committed_
  JobRanks committed_;  // this and the next three: sets of our next report
  JobRanks gone_;
  JobRanks settled_;
  JobRanks suspected_;
  JobRanks out_;                         // gone_ and suspected_
  JobRanks joins_;                       // candidates, out or not
  JobRanks lastKnown_;                   // gone ranks of which said_ is complete
  std::vector<Accusation> accusations_;  // by number, for the ranks in out_
  std::vector<Candidate> candidates_;    // by number less size(): all that a report has named
  std::vector<JobRanks> asked_;          // sets of joins that we have reported

  std::vector<Said> reported_;  // by number: all that it has reported in this term
  std::map<int, Said> older_;   // by number: what it reported before, as far as it still matters
  JobRanks unclear_;            // ranks with a report that we could not read
  Said counted_;                // all numbers below firstMissing_ that count have reported this
  int firstMissing_ = 0;
  ViewReport told_;
  Told toldSets_;                     // told_ in our numbers
  std::optional<Repetition> repeat_;  // of told_, once it was sent

  std::map<int, Cause> heldBack_;  // by number
  Clock::time_point heldUntil_{};
  bool over_ = false;
};

}  // namespace mooncake
