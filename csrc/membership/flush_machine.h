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

#include "base/deadline.h"
#include "membership/flush.h"

// How the members of a group agree on the end of an operation, seen from one of them: when this
// rank freezes, reports, decides, and what it tells. Pure, as ViewAgreement is: events in, actions
// out; no thread, no socket, and the time comes with the event. docs/membership.md, section 3.
namespace mooncake {

// What the driver does, in this order, before the next event.
struct FlushAction {
  // The caller begins nothing any more, and what it waits for is interrupted. When it is seen to be
  // in no operation, the driver says so: stopped().
  struct Freeze {};
  // Operations up to this one have ended here.
  struct End {
    uint64_t number = 0;
  };
  // What we have of the part of rank `of` goes to the rank `to`, which is behind in this operation.
  struct Supply {
    uint64_t number = 0;
    int of = 0;
    int to = 0;
  };
  // The flush is over: the caller may begin, and what it runs next runs as this attempt among these
  // members.
  struct GoOn {
    Attempt attempt;
    uint64_t viewEpoch = 1;
    std::vector<int> members;  // ascending
    // One operation first runs without some of them; none if the number is 0.
    SkippingOperation first;
  };
  struct Tell {
    std::vector<int> to;
    FlushMessage message;
  };
  struct LookUp {};  // what the caller waits for may have come
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

// The members that a view of the job leaves, and how the others went.
struct FlushView {
  // It destroyed nothing before it went.
  struct Loss {
    int rank = 0;
    std::string detail;
  };

  uint64_t epoch = 1;        // of the job's view
  std::vector<int> active;   // ranks of the group, ascending
  std::vector<Loss> losses;  // of all that are not active: of this view, or also of earlier ones
};

// What the driver owes:
//  - hasEnded() comes before every other event. While the caller is in an operation it ends at most
//    that one; while it is in none and the machine is frozen it begins none.
//  - stopped() as soon as wantsReport() and the caller is seen to be in no operation, behind
//    Freeze. What it has ended is read after that, or the report may deny what it has committed.
//  - What is to be told may be lost, and may come in any order.
class FlushMachine {
 public:
  using AbortReason = FlushReport::AbortReason;
  struct Options {
    std::string group;
    int rank = 0;
    int size = 1;
    bool raises = false;       // mode `raise`
    bool founds = false;       // operation 1 is the beginning of the job: with all members or none
    uint32_t lostBefore = 0;   // members that were out of the job before the group was made
    uint32_t mostRounds = 0;   // what a stamp has room for
    Clock::duration resend{};  // who lacks a report asks for it this often
    std::function<std::string(int)> nameRank;
  };

  explicit FlushMachine(Options options);

  // -- of the caller

  // The last operation that it has ended by itself, as far as it is known.
  void hasEnded(uint64_t number) {
    ended_ = std::max(ended_, number);
    if (first_.number != 0 && first_.number <= ended_) endFirst();
  }
  // It is about to end this operation with an error that all members come to by themselves.
  void endsWith(uint64_t number, const Error& why) { remember(number, why); }
  // It publishes that it is in this operation.
  void begins(uint64_t number) { begun_ = number; }
  // Whoever has not begun this operation, which it has, may be left out of it. Stays until that has
  // ended.
  void wishesToSkip(uint64_t number) { skips_ = number; }
  // It cannot go on in this operation, with a reason why the operation should end, or without. It
  // has stopped if it says so; Freeze asks for it otherwise.
  FlushActions parked(uint64_t number, AbortReason abort, Error why, Clock::time_point now);
  FlushActions stopped();
  // It has taken over the operation that it was behind in.
  FlushActions caughtUp();
  // Who is not left out of leftOutOf() has ended it: so it ends here, too.
  FlushActions skipped();
  // It has ended its last operation, and so have all others.
  FlushActions leave();

  // -- of the others

  FlushActions received(int from, const FlushMessage& message, Clock::time_point now);
  FlushActions viewed(const FlushView& view, Clock::time_point now);
  // Of what was put or sent to the rank, any part may be lost, and of what it sent.
  FlushActions reconnected(int rank, bool isInOperation, Clock::time_point now);
  FlushActions tick(Clock::time_point now);
  // When tick() will have something to do, if nothing else happens before.
  std::optional<Clock::time_point> nextTick() const { return repeatAt_; }
  // Who may still read the slot that this operation is to use is asked again.
  FlushActions askForSlot(uint64_t number) const;

  bool isFrozen() const { return isFrozen_; }
  bool wantsReport() const { return isFrozen_ && !hasReported_ && losses() >= target_.losses; }
  bool hasReported() const { return hasReported_; }
  Attempt attempt() const { return attempt_; }  // of the last decision
  Attempt target() const { return target_; }    // of the flush under way, when frozen
  uint64_t ended() const { return ended_; }
  // The operation in which the caller is behind: another rank has ended it well, as the attempt
  // that it was. 0: none.
  uint64_t toTake() const { return toTake_; }
  // The operation that runs without us, and among whom. Number 0: none.
  SkippingOperation leftOutOf() const;
  // Who has to have ended it: of its contributors, those whom the last decision has not lost.
  RankSet awaitedIn(const SkippingOperation& operation) const;
  // Of an operation that did not end here by itself: null if it ended with howEnded(). What is
  // asked for once is forgotten, and what was before.
  std::optional<SkippingOperation> takeSkipped(uint64_t number);
  Error howEnded(uint64_t number) const;

  uint64_t viewEpoch() const { return viewEpoch_; }
  const std::vector<int>& active() const { return active_; }  // in the job's last view
  bool isActive(int rank) const;                              // and has not left the group
  std::vector<int> missing() const;                           // active, and their reports are
  std::vector<int> left() const;
  const std::vector<uint64_t>& knownEnded() const { return knownEnded_; }  // by rank, at least
  bool isSlotFree(uint64_t number) const;
  // Of the members of the attempt, one has left the group: before this operation, or at all.
  bool missesLeaver(uint64_t number) const;
  bool hasLeaver() const { return missesLeaver(~uint64_t(0)); }

 private:
  using Reports = std::vector<const FlushReport*>;

  Attempt newest() const { return isFrozen_ ? target_ : attempt_; }
  bool isInView(int rank) const;
  bool isMissing(int rank) const;
  bool holdsSlot(int rank, uint64_t number) const;
  uint32_t losses() const;
  const Error* errorOf(uint64_t number) const;
  void remember(uint64_t number, Error error);
  std::vector<std::pair<int, std::string>> newLosses() const;
  Error lostError() const;
  void heedLeavers(FlushActions& actions);
  void endFirst();
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
  void tellAll(FlushMessage message, FlushActions& actions) const;
  template <typename... Words>
  void note(FlushActions& actions, const Attempt& attempt, const Words&... words) const;

  const Options options_;
  uint64_t ended_ = 0;
  bool isFrozen_ = false;
  bool isOver_ = false;
  Attempt attempt_;
  Attempt target_;
  std::vector<int> members_;  // of the attempt
  uint64_t viewEpoch_ = 1;
  std::vector<int> active_;
  std::vector<int> decided_;         // active_ when the last flush was decided
  std::map<int, std::string> lost_;  // of who is not active and is missed: what is known of it
  bool hasReported_ = false;         // for target_
  // The last one; for target_ or, when not frozen, attempt_: unless joined and not reported since.
  std::optional<FlushReport> lastReport_;
  Attempt reportedFor_;
  struct {
    uint64_t stoppedAt = ~uint64_t(0);
    bool hasBegun = false, wantsToSkip = false;
  } lastSaid_;                              // in the last report
  std::optional<FlushReport> leaveReport_;  // what we said when we left, if we have
  std::map<int, FlushReport> reports_;      // for target_
  std::map<int, FlushReport> left_;         // of who has left the group: stands for its next report
  std::vector<uint64_t> knownEnded_;
  std::deque<FailedOperation> failed_;  // the last kRemembered, ascending
  uint64_t toTake_ = 0;
  uint64_t begun_ = 0;                      // the last operation that the caller published to be in
  uint64_t skips_ = 0;                      // the one that it wishes to go on in without the others
  SkippingOperation first_;                 // the next one, if it runs without some
  std::deque<SkippingOperation> skipping_;  // that ended well and without some: the last ones...
  std::deque<SkippingOperation> untold_;    // ... and without us: those that the caller still calls
  AbortReason abortReason_ = AbortReason::kNone;
  uint64_t abortNumber_ = 0;
  Error why_;
  std::optional<Clock::time_point> repeatAt_;
};

}  // namespace mooncake
