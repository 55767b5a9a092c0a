#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "base/deadline.h"
#include "membership/rank_set.h"
#include "membership/view.h"

// How the ranks of a job agree on who goes on, seen from one of them. Pure: events in, actions out;
// no thread, no socket, and the time comes with the event.
//
// Every rank tells all others whom it knows to be gone and whom it suspects (together: who is out),
// and takes over what they tell. A view is committed when every rank in it has reported exactly the
// others to be out; with a suspicion among them, it also needs a quorum.
//
// Why two views that living ranks committed are never side by side: what a rank reports only grows,
// so two views that have one rank in common are one inside the other. Two that have none need two
// quorums of the same last view. Both leave out ranks that are gone - but only resolution ones: all
// that these ever reported is part of what the counting rank reports, so they cannot have helped
// a view that it does not know of. Without a suspicion no quorum is needed: then all ranks of the
// other view are dead, and what they returned binds nobody.
namespace mooncake {

// How a rank is known to be out. Three are certain, the others are suspicion.
enum class Cause : uint8_t {
  kExited = 1,       // the kernel of its host said so
  kLeft = 2,         // it said goodbye; never an accusation
  kSilent = 3,       // nothing was heard for failure_timeout
  kRefused = 4,      // it refused to be connected to, and nobody on its host could testify
  kExcludes = 5,     // its own report takes the accuser out
  kUnreachable = 6,  // its connection broke and could not be made again, nobody knows why
  kEnded = 7,        // certain: as kLeft, but its program ended and destroyed nothing
};

inline bool isGoodbye(Cause cause) { return cause == Cause::kLeft || cause == Cause::kEnded; }

struct Accusation {
  int rank = 0;
  Cause cause = Cause::kExited;
  int by = 0;  // who saw it first, as far as we know

  bool operator==(const Accusation&) const = default;
};

// All that a rank has to say. Every set only grows, so a report says at least what the same rank's
// earlier ones said: losing, repeating and reordering them does no harm.
struct ViewReport {
  int from = 0;
  RankSet committed;   // who is out of the sender's last view
  RankSet gone;        // certain
  RankSet resolution;  // those of the gone that took out nobody but who is out here, too
  RankSet suspected;   // and not certain
  std::vector<Accusation> accusations;  // of all that are out, by rank

  RankSet out() const { return gone | suspected; }
  bool operator==(const ViewReport&) const = default;
};

Bytes encodeViewReport(const ViewReport& report);
// kProtocol unless all of it makes sense in a job of `ranks` ranks.
Result<ViewReport> decodeViewReport(ByteView bytes, int ranks);

struct ViewActions {
  struct Eviction {
    Accusation why;      // `rank` is who is evicted: this rank
    uint64_t epoch = 0;  // of the view that it is not in
    int toldBy = 0;
  };

  std::vector<Accusation> accused;  // new here: to be logged, each once
  std::optional<View> commit;
  RankSet sendTo;  // report() goes to these
  // The end, for good: from here on no event does anything. The driver says goodbye, so that
  // nobody waits for this rank's report.
  bool minority = false;
  std::optional<Eviction> evicted;
};

// What the driver owes:
//  - A report is published where the witnesses of our exit will find it (the ranks of our host)
//    before it is sent to anybody, and so is a goodbye, which carries the last one.
//  - suspected() gets all ranks that one look found silent at once: a rank that has gone deaf then
//    accuses everybody in one report, which nobody believes, instead of one after the other.
//  - received() gets only reports of the very process that the connection was made with; what does
//    not decode is dropped. Many events may be handed over before report() is sent, once.
//  - received() gets a report that says who has left once we have heard that from them, too, or not
//    for too long: HeldReports says why.
//  - Whoever is not in the view and gives a sign of life is sent report(): it says why.
class ViewAgreement {
 public:
  struct Timing {
    // How long an accusation is held back (see suspected): more than two ranks' detectors differ,
    // and a report's way.
    Clock::duration grace;
    Clock::duration resend;  // while something is undecided, the report is sent again this often
  };
  // What a rank reported last before it exited: received() has been given it, or it may be lost.
  // That it said no goodbye is known in both cases, for what it returned would count then. Who only
  // saw a process end, a launcher say, cannot tell, and suspects.
  enum class LastReport { kReceived, kUnknown };

  ViewAgreement(int self, View first, Timing timing);

  ViewActions exited(const RankSet& ranks, LastReport last, Clock::time_point now);
  // After received() was given the report that came with the goodbye. Who has said goodbye is never
  // exited, even if its end is all that was seen.
  ViewActions left(int rank, Clock::time_point now, Cause cause = Cause::kLeft);
  // Held back for a grace where the ranks are not all higher than ours, or others are held back:
  // when one link breaks, only one of its ends accuses, and it costs one rank instead of two.
  ViewActions suspected(const RankSet& ranks, Cause cause, Clock::time_point now);
  ViewActions received(const ViewReport& report, Clock::time_point now);
  ViewActions tick(Clock::time_point now);
  // When tick() will have something to do, if nothing else happens before.
  std::optional<Clock::time_point> nextTick() const;

  const View& view() const { return view_; }
  // What we last told anybody, or are to tell now.
  const ViewReport& report() const { return told_; }

 private:
  bool isUndecided() const { return committed_ != out_; }
  void note(const Accusation& accusation, ViewActions& actions);
  void holdBack(const RankSet& ranks, Cause cause, Clock::time_point now);
  void accuse(const RankSet& ranks, Cause cause, ViewActions& actions);
  ViewActions testify(const RankSet& ranks, Cause cause, LastReport last, Clock::time_point now);
  void merge(const ViewReport& report, ViewActions& actions);
  void resolve();
  bool mayGoOn() const;
  bool allReported();
  void commit(const RankSet& out, ViewActions& actions);
  ViewActions conclude(ViewActions actions, Clock::time_point now);

  const int self_;
  const View first_;
  const Timing timing_;

  View view_;          // first_ without committed_
  RankSet committed_;  // the sets of our next report
  RankSet gone_;
  RankSet settled_;
  RankSet suspected_;
  RankSet out_;                          // gone_ and suspected_
  RankSet lastKnown_;                    // gone, and reported_ has all that they ever reported
  std::vector<Accusation> accusations_;  // by rank; of those in out_

  std::vector<RankSet> reported_;  // by rank: whom it has ever reported to be out
  RankSet counted_;                // all below firstMissing_ that count have reported this
  int firstMissing_ = 0;
  ViewReport told_;
  Clock::time_point toldAt_{};

  std::map<int, Cause> heldBack_;  // rank
  Clock::time_point heldUntil_{};
  bool over_ = false;
};

}  // namespace mooncake
