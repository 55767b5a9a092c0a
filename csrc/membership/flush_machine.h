#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/backoff.h"
#include "base/deadline.h"
#include "base/rank_list.h"
#include "membership/flush.h"

// How the members of a group agree on the end of an operation, seen from one member: when it
// freezes, reports and decides, and which messages it sends. Pure like ViewAgreement: events in,
// actions out; no thread and no socket, and the time comes with the event. See section 3 of
// docs/membership.md.
namespace mooncake {

// Actions that the driver carries out, in this order, before the next event.
struct FlushAction {
  // Keeps the caller from beginning operations and interrupts its wait. When the driver sees that
  // the caller is in no operation, it calls stopped().
  struct Freeze {};
  // Operations up to this one have ended here.
  struct End {
    uint64_t number = 0;
  };
  // Sends our copy of the part of rank `of` to rank `to`, which is behind in this operation.
  struct Supply {
    uint64_t number = 0;
    int of = 0;
    int to = 0;
  };
  // The flush is over: the caller may begin. Its operations run as this attempt among `members`.
  struct GoOn {
    Attempt attempt;
    uint64_t viewEpoch = 1;
    std::vector<int> members;  // ascending
    // The next operation, if it runs without some of the members; else its number is 0.
    SkippingOperation first;
  };
  struct Tell {
    std::vector<int> to;
    FlushMessage message;
  };
  struct LookUp {};  // the data that the caller waits for may have come
  struct Interrupt {};
  struct Fail {  // the group is over
    Error why;
  };
  struct Note {  // for the log
    std::string text;
  };
};
using FlushActions =
    std::vector<std::variant<FlushAction::Freeze, FlushAction::End, FlushAction::Supply,
                             FlushAction::GoOn, FlushAction::Tell, FlushAction::LookUp,
                             FlushAction::Interrupt, FlushAction::Fail, FlushAction::Note>>;

// The members that remain in a view of the job, and the losses among the other members.
struct FlushView {
  // A rank that went without destroying the job.
  struct Loss {
    int rank = 0;
    std::string detail;
  };

  uint64_t epoch = 1;        // epoch of the job's view
  std::vector<int> active;   // ranks of the group, ascending
  std::vector<Loss> losses;  // ranks lost in this view, or also in earlier ones
};

// The driver's duties:
//  - It calls hasEnded() before every other event. A caller that is in an operation ends at most
//    that one. A caller that is in none begins none while the machine is frozen.
//  - It calls stopped() as soon as wantsReport() is true and, after Freeze, it sees the caller in
//    no operation. It reads the caller's last ended operation after that; otherwise the report may
//    deny an operation that the caller has committed.
//  - It calls move() as soon as wantsToMove() is true.
//  - It may lose messages and deliver them in any order.
class FlushMachine {
 public:
  using AbortReason = FlushReport::AbortReason;
  struct Options {
    std::string group;
    int rank = 0;
    int size = 1;
    bool raises = false;           // mode `raise`
    bool founds = false;           // operation 1 begins the job: with all members or not at all
    uint32_t lostBefore = 0;       // members that were out of the job before the group was made
    uint32_t mostRounds = 0;       // highest round that fits into a stamp
    Clock::duration resend{};      // first pause before a rank asks again for missing reports
    std::vector<int> globalRanks;  // for messages, see nameRanks()
  };

  explicit FlushMachine(Options options);

  // -- events from the caller, the thread that runs operations

  // The last operation that the caller has ended by itself, as far as is known.
  void hasEnded(uint64_t number) {
    ended_ = std::max(ended_, number);
    if (first_.number != 0 && first_.number <= ended_) endFirst();
  }
  // The caller is about to end this operation with an error that all members reach by themselves.
  void endsWith(uint64_t number, const Error& why) { remember(number, why); }
  // The caller publishes that it is in this operation.
  void begins(uint64_t number) { begun_ = number; }
  // The caller has begun this operation and accepts that ranks that have not begun it are left out.
  // The wish stays until the operation has ended.
  void wishesToSkip(uint64_t number) { skips_ = number; }
  // The caller cannot go on in this operation; `abort` and `why` may give a reason to end it. A
  // caller that parks has stopped; Freeze stops a caller that does not park.
  FlushActions parked(uint64_t number, AbortReason abort, Error why, Clock::time_point now);
  FlushActions stopped();
  // The caller has adopted the operation in which it was behind.
  FlushActions caughtUp();
  // All ranks that run leftOutOf() have ended it, so it ends here, too.
  FlushActions skipped();
  // The caller is to leave after this operation. Ranks that leave tell each other in log2(n) rounds
  // of one message, as in a dissemination barrier: in round i, once a rank knows that the last 2^i
  // ranks up to itself have ended the operation, it tells the rank 2^i further on. Call it again
  // after peerHasEnded().
  FlushActions leaving(uint64_t number);
  void peerHasEnded(int rank, uint64_t number) {
    knownEnded_[rank] = std::max(knownEnded_[rank], number);
  }
  // The rank has said goodbye to the job, though the view may still have it: it needs nothing.
  void saidGoodbye(int rank) { gone_.add(rank); }
  // True if every other active member has left, or is known to leave after the same operation, and
  // none has ended more operations than this rank. No rank then needs our leave report, and none
  // calls an operation that has yet to end here.
  bool doAllLeave() const;
  // The caller has ended its last operation, and so have all other members.
  FlushActions leave();
  // Returns the messages that tell a member all that this rank has said of its leave. Empty: it has
  // not left.
  std::vector<FlushMessage> lastWords() const;
  bool hasLeft() const { return leaveReport_.has_value(); }

  // -- how the series ends (flush_close.cc)

  // This rank has prepared the successor. Returns nothing if it is ready for as many already.
  std::optional<FlushActions> readyFor(uint64_t successor);
  // Takes that back, and a wish for it. A flush that is under way may still decide a close with it.
  FlushActions notReadyFor(uint64_t successor);
  // This rank wishes to move to the successor, until a close is decided. 0: it wishes no more.
  void wishesFor(uint64_t successor, Clock::time_point now);
  // The rank has a wish, and knows of every member that it is ready.
  bool wantsToMove() const;
  // Begins a round without a reason, also in no operation.
  FlushActions move(Clock::time_point now);
  // The close that this rank has acted on. Once set, it stays.
  const std::optional<SeriesClose>& close() const { return close_; }
  uint64_t wish() const { return wish_; }
  // Active members that are not known to be ready for it; this rank, too.
  std::vector<int> unready(uint64_t successor) const;

  // -- events from other ranks, and timers

  FlushActions received(int from, const FlushMessage& message, Clock::time_point now);
  FlushActions viewed(const FlushView& view, Clock::time_point now);
  // The connection to the rank was made again: data put or sent either way may be lost.
  FlushActions reconnected(int rank, bool isInOperation, Clock::time_point now);
  FlushActions tick(Clock::time_point now);
  // When tick() has work to do if no other event comes first.
  std::optional<Clock::time_point> nextTick() const;
  // Asks the ranks that may still read the slot of this operation how far they are.
  FlushActions askForSlot(uint64_t number) const;

  bool isFrozen() const { return isFrozen_; }
  bool wantsReport() const { return isFrozen_ && !hasReported_ && losses() >= target_.losses; }
  bool hasReported() const { return hasReported_; }
  Attempt attempt() const { return attempt_; }  // attempt of the last decision
  Attempt target() const { return target_; }    // attempt of the current flush, when frozen
  uint64_t ended() const { return ended_; }
  // The operation that the caller has to adopt: another rank has ended it well, as the attempt in
  // which the caller stopped. 0: none.
  uint64_t toTake() const { return toTake_; }
  // The operation that runs without this rank, and its contributors. Number 0: none.
  SkippingOperation leftOutOf() const;
  // Ranks that must have ended the operation first: its contributors that the last decision kept.
  GroupRanks awaitedIn(const SkippingOperation& operation) const;
  // How an operation ended that this rank did not end itself: the contributors if this rank was
  // skipped; null if it ended with howEnded(). Forgets this operation and all earlier ones.
  std::optional<SkippingOperation> takeSkipped(uint64_t number);
  Error howEnded(uint64_t number) const;

  uint64_t viewEpoch() const { return viewEpoch_; }
  const std::vector<int>& active() const { return active_; }  // in the job's last view
  bool isActive(int rank) const;     // in the view, and has not left the group
  std::vector<int> missing() const;  // active ranks whose reports are missing
  std::vector<int> left() const;
  const std::vector<uint64_t>& knownEnded() const { return knownEnded_; }  // by rank, at least
  bool isSlotFree(uint64_t number) const;
  // True if a member of the attempt left the group before this operation. hasLeaver(): at any time.
  bool missesLeaver(uint64_t number) const;
  bool hasLeaver() const { return missesLeaver(~uint64_t(0)); }

 private:
  using Reports = std::vector<const FlushReport*>;
  // Longest pause between repetitions, as a multiple of the first. No budget ends them: a rank that
  // lacks a report cannot go on.
  static constexpr int kMostResend = 8;

  Attempt newest() const { return isFrozen_ ? target_ : attempt_; }
  bool isInView(int rank) const;
  bool isMissing(int rank) const;
  bool holdsSlot(int rank, uint64_t number) const;
  uint32_t losses() const;
  const Error* errorOf(uint64_t number) const;
  void remember(uint64_t number, Error error);
  std::vector<std::pair<int, std::string>> newLosses() const;
  Error lostError() const;
  std::string nameRank(int rank) const {
    return nameRanks(std::span(&rank, 1), options_.globalRanks);
  }
  void heedLeavers(FlushActions& actions);
  void endFirst();
  void closes(const SeriesClose& close);
  std::optional<Attempt> laterFlushOfLeaver() const;
  void askTheUnready(Clock::time_point now, FlushActions& actions);
  void rememberSkip(SkippingOperation operation);
  FlushReport soFar(Attempt attempt);

  void join(Attempt attempt, std::string_view why, Clock::time_point now, FlushActions& actions);
  void failForRounds(Attempt attempt, FlushActions& actions);
  void hear(const FlushReport& report, Clock::time_point now, FlushActions& actions);
  void answer(int rank, Attempt attempt, FlushActions& actions) const;
  void decide(FlushActions& actions);
  void act(const FlushDecision& decision, const Reports& reports, FlushActions& actions);
  void supply(const FlushDecision& decision, const Reports& reports, FlushActions& actions) const;
  FlushMessage endedNow() const;
  bool hasHeardOf(int rank) const;
  bool leavesWithUs(int rank) const;
  void passOn(FlushActions& actions);
  void tellAll(FlushMessage message, FlushActions& actions) const;
  template <typename... Words>
  void note(FlushActions& actions, const Attempt& attempt, const Words&... words) const;

  const Options options_;
  uint64_t ended_ = 0;
  bool isFrozen_ = false;
  bool isOver_ = false;
  Attempt attempt_;
  Attempt target_;
  std::vector<int> members_;  // members of attempt_
  uint64_t viewEpoch_ = 1;
  std::vector<int> active_;
  std::vector<int> decided_;         // active_ when the last flush was decided
  std::map<int, std::string> lost_;  // lost ranks that are not active: details of the loss
  bool hasReported_ = false;         // for target_
  // Our last report, for target_ or, when not frozen, attempt_. Reset by join().
  std::optional<FlushReport> lastReport_;
  Attempt reportedFor_;
  struct {
    uint64_t stoppedAt = ~uint64_t(0);
    bool hasBegun = false, wantsToSkip = false;
    std::vector<uint64_t> ready;
    uint64_t wish = 0;
  } lastSaid_;                              // values of the last report
  std::optional<FlushReport> leaveReport_;  // set once we have left
  std::map<int, FlushReport> reports_;      // for target_
  std::map<int, FlushReport> left_;         // by leaver: stands for its report in every later flush
  std::vector<uint64_t> knownEnded_;
  std::optional<uint64_t> leavingAfter_;  // set by leaving()
  std::vector<uint64_t> leaveAfter_;      // by rank: known to leave after it; 0: not known
  GroupRanks gone_;                       // ranks that have said goodbye
  int rounds_ = 0;                        // rounds of leaving() that are done
  std::deque<FailedOperation> failed_;    // the last kRemembered, ascending
  uint64_t toTake_ = 0;
  uint64_t begun_ = 0;       // the last operation that the caller published
  uint64_t skips_ = 0;       // the operation that it wishes to run without late ranks
  SkippingOperation first_;  // the next one, if it runs without some ranks; else number 0
  std::deque<SkippingOperation> skipping_;  // the last kRememberedSkips without some ranks
  std::deque<SkippingOperation> untold_;    // skips of this rank that the caller has yet to call
  std::vector<uint64_t> ready_;             // ascending
  std::vector<std::vector<uint64_t>> peersReady_;  // by rank, as last heard; not of this rank
  uint64_t wish_ = 0;
  std::optional<Repetition> asking_;  // of the members that are not known to be ready
  std::optional<SeriesClose> close_;
  AbortReason abortReason_ = AbortReason::kNone;
  uint64_t abortNumber_ = 0;
  Error why_;
  std::optional<Repetition> repeat_;
};

}  // namespace mooncake
