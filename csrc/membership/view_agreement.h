#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/backoff.h"
#include "base/bytes.h"
#include "base/deadline.h"
#include "membership/rank_set.h"
#include "membership/view.h"

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
namespace mooncake {

// Reasons to count a rank as out. Three are certain, the other reasons are suspicions.
enum class Cause : uint8_t {
  kExited = 1,       // certain: the kernel of its host said so
  kLeft = 2,         // certain: it said goodbye; never an accusation
  kSilent = 3,       // nothing was heard from it for failure_timeout
  kRefused = 4,      // it refused a connection, and no rank on its host could testify
  kExcludes = 5,     // its own report excludes the accuser
  kUnreachable = 6,  // its connection broke and could not be made again, for an unknown reason
  kEnded = 7,        // certain: like kLeft, but its program ended without destroying the job
};

inline bool isGoodbye(Cause cause) { return cause == Cause::kLeft || cause == Cause::kEnded; }

struct Accusation {
  int rank = 0;
  Cause cause = Cause::kExited;
  int by = 0;  // the first rank that saw it, as far as we know

  bool operator==(const Accusation&) const = default;
};

// The whole state of a rank. Its sets only grow (a suspicion may become certain), so a report
// includes all earlier ones of the same rank: losing, repeating and reordering them does no harm.
struct ViewReport {
  int from = 0;
  JobRanks committed;  // out of the sender's last view
  JobRanks gone;       // certainly out
  JobRanks settled;    // gone, and all ranks that its last report excludes are out here, too
  JobRanks suspected;  // out, but not certainly
  std::vector<Accusation> accusations;  // one for each rank that is out, by rank

  JobRanks out() const { return gone | suspected; }
  bool operator==(const ViewReport&) const = default;
};

Bytes encodeViewReport(const ViewReport& report);
// kProtocol: the report is inconsistent in a job of `ranks` ranks.
Result<ViewReport> decodeViewReport(ByteView bytes, int ranks);

struct ViewActions {
  struct Eviction {
    Accusation why;      // `rank` is this rank
    uint64_t epoch = 0;  // epoch of the view that excludes it
    int toldBy = 0;
  };

  std::vector<Accusation> accused;  // new here: each is logged once
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

  ViewAgreement(int self, View first, Timing timing);

  ViewActions exited(const JobRanks& ranks, LastReport last, Clock::time_point now);
  // Call it after received() was given the report of the goodbye. A rank that said goodbye is never
  // passed to exited(), even if only its end was seen.
  ViewActions left(int rank, Clock::time_point now, Cause cause = Cause::kLeft);
  // Holds the accusation back for a grace, unless it is kRefused or all ranks are higher than ours
  // and no accusation is held back. If one link breaks, only one of its ends then accuses, and the
  // job loses one rank instead of two.
  ViewActions suspected(const JobRanks& ranks, Cause cause, Clock::time_point now);
  ViewActions received(const ViewReport& report, Clock::time_point now);
  ViewActions tick(Clock::time_point now);
  // When tick() has work to do if no other event comes first.
  std::optional<Clock::time_point> nextTick() const;

  const View& view() const { return view_; }
  // The last report that was sent, or is to be sent now.
  const ViewReport& report() const { return told_; }

 private:
  bool isUndecided() const { return committed_ != out_; }
  void note(const Accusation& accusation, ViewActions& actions);
  void holdBack(const JobRanks& ranks, Cause cause, Clock::time_point now);
  void accuse(const JobRanks& ranks, Cause cause, ViewActions& actions);
  ViewActions testify(const JobRanks& ranks, Cause cause, LastReport last, Clock::time_point now);
  void merge(const ViewReport& report, ViewActions& actions);
  void settle();
  bool mayGoOn() const;
  bool allReported();
  void commit(const JobRanks& out, ViewActions& actions);
  ViewActions conclude(ViewActions actions, Clock::time_point now);

  const int self_;
  const View first_;
  const Timing timing_;

  View view_;           // first_ without committed_
  JobRanks committed_;  // this and the next three: sets of our next report
  JobRanks gone_;
  JobRanks settled_;
  JobRanks suspected_;
  JobRanks out_;                         // gone_ and suspected_
  JobRanks lastKnown_;                   // gone ranks of which reported_ is complete
  std::vector<Accusation> accusations_;  // by rank, for the ranks in out_

  std::vector<JobRanks> reported_;  // by rank: all ranks that it ever reported to be out
  JobRanks counted_;  // all ranks below firstMissing_ that count have reported this set
  int firstMissing_ = 0;
  ViewReport told_;
  std::optional<Repetition> repeat_;  // of told_, once it was sent

  std::map<int, Cause> heldBack_;  // by rank
  Clock::time_point heldUntil_{};
  bool over_ = false;
};

}  // namespace mooncake
