#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/rank_list.h"
#include "base/wait.h"
#include "group/flush_outbox.h"
#include "group/flush_owner.h"
#include "group/renewal.h"
#include "membership/flush_machine.h"
#include "membership/membership.h"
#include "membership/rank_set.h"

namespace mooncake {

// State of an agent, for debugging a hang (group_state.h).
struct FlushState {
  Attempt attempt;  // of the last decision
  bool isFrozen = false;
  Attempt target;            // of the flush under way, when frozen
  bool hasReported = false;  // for that flush
  bool isBusy = false;       // the caller is in an operation
  std::vector<int> missing;  // ranks that have not reported, when frozen
  uint64_t viewEpoch = 1;
  std::vector<int> active;  // members of the job's view
  std::vector<int> left;    // ranks that have left the group
  // By rank: the last operation that the rank is known to have ended, a lower bound.
  std::vector<uint64_t> ended;
  std::optional<SeriesClose> close;
  uint64_t wish = 0;         // the successor to which this rank wishes to move; 0: none
  std::vector<int> unready;  // members that are not known to be ready for it
};

// Drives FlushMachine, which decides. The agent stops the caller, carries the messages, and lets
// the caller go on. It has no thread of its own: the thread that brings the last missing event runs
// it, the engine's with a report or the caller's when it stops. So it goes on while the caller is
// away.
class FlushAgent final : public Membership::Listener,
                         public std::enable_shared_from_this<FlushAgent> {
 public:
  struct Options {
    std::string group;
    int rank = 0;
    std::vector<int> jobRanks;             // global ranks of the members, by rank in the group
    std::shared_ptr<const Roster> roster;  // of the job when the group was made
    uint64_t topic = 0;                    // the same on all members, and used by no other group
    bool raises = false;
    bool founds = false;
    std::vector<int> globalRanks;  // for messages, see nameRanks()
  };

  // Begins with start(), ends with stop().
  FlushAgent(FlushOwner& owner, Membership& membership, Options options);
  void start();
  void stop();

  // Begins an operation, on the one thread that runs the group's operations. It is busy until
  // end(), and this rank reports nothing meanwhile. If the operation has ended without us, returns
  // the error that it ended with. If it ended well, returns kInterrupted, and takeSkipped() returns
  // its contributors. kMoved: the series has ended before it.
  Status begin(uint64_t number) {
    busy_.store(true, std::memory_order_relaxed);
    // Either we see `frozen`, or the thread that freezes sees that we are busy.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!frozen_.load(std::memory_order_acquire) && !renewal_.isDecided() && ended() < number)
      return {};
    return beginSlowly(number);
  }
  std::shared_ptr<const GroupView> takeSkipped() { return std::exchange(skipped_, nullptr); }
  // Notes that the caller is about to publish that it is in the operation.
  void begins(uint64_t number) { begun_ = number; }
  // Attempt and members of the operation, for a busy caller. Not checked: both only change while
  // the agent is frozen and its caller is not busy.
  Attempt attempt() const NOT_CHECKED { return attempt_; }
  const std::shared_ptr<const GroupView>& view() const NOT_CHECKED { return view_; }
  // Members of the next operations, for a caller that is not busy. None of them is skipped.
  std::shared_ptr<const GroupView> viewWhenIdle() const;
  // Any thread, any time.
  FlushState state() const;
  // True: a caller in an operation must stop, any other must begin none.
  bool isFrozen() const { return frozen_.load(std::memory_order_acquire); }
  // True if a member of the view has left the group before this operation, so that its part will
  // never come. resolve() then continues without that rank.
  bool missesLeaver(uint64_t number) const {
    return hasLeaver_.load(std::memory_order_acquire) && missesLeaverSlowly(number);
  }

  // Waits until no member uses the slot of this operation any more. kInterrupted: frozen.
  Status awaitSlot(uint64_t number);
  // The same, called before begin(): a freeze does not end the wait.
  Status awaitSlotBefore(uint64_t number) { return awaitSlot(number, false); }
  // Notes that the caller has seen all members begin this operation, none of them skipped. So all
  // have ended the one before.
  void allBegan(uint64_t number) { allBegan_ = number; }

  struct Resolution {
    enum class Kind {
      kAgain,    // the operation starts again, as attempt()
      kTake,     // another rank has ended the same attempt well, so we can end it, too
      kEnded,    // it ended with `status`, on all ranks
      kSkipped,  // it ended well, on all ranks, without us: its contributors are in `view`
      kMoved,    // the series has ended before it; this rank has not published that it began it
    };
    Kind kind = Kind::kAgain;
    Status status;
    std::shared_ptr<const GroupView> view;  // kEnded: ranks that go on; null: this group does not
  };
  enum class Wish { kNone, kSkip };  // kSkip: go on without the ranks that have not begun it
  // Reports that the caller has stopped, and waits for the decision. The caller touches nothing of
  // the group any more. `abort` and `why`: the reason, if it wants the operation to end. `called`:
  // the time of its call. Busy again after kAgain and kTake.
  Resolution resolve(uint64_t number, Clock::time_point called, FlushReport::AbortReason abort,
                     Error why, Wish wish = Wish::kNone);
  // Notes that the operation has ended here. The caller touches nothing of the group any more.
  // `goesOn`: if it has ended well, further operations of its call follow.
  void end(uint64_t number, const Status& status, bool goesOn = false);

  uint64_t ended() const { return endedWord_->load(std::memory_order_relaxed); }

  // True if the rank is in the last view and has not left the group.
  bool isActive(int rank) const;
  // Waits until every other member has ended this operation, or is gone, or the deadline has
  // passed. Then tells the members that we leave, so that they need not ask us any more.
  void leave(uint64_t number, Deadline deadline);
  // True if no other member calls an operation that has yet to end here: see
  // FlushMachine::doAllLeave().
  bool doAllLeave();
  // The first half of leave(): only waits.
  void awaitEnded(uint64_t number, Deadline deadline);
  Renewal& renewal() { return renewal_; }
  // Which members leave, too, as a rule, and are given a moment to come: of the job, of the series, or
  // none, as they are in the next operation.
  enum class Leavers { kWholeJob, kSeries, kOnlyUs };
  // See Renewal::leave(). Other groups of this rank go on.
  Status leaveSeries(Deadline deadline, Leavers leavers = Leavers::kSeries);
  // Tells the membership that an operation misses the ranks of `before` that are not in `now`.
  void noteMissed(const GroupView& before, const GroupView& now);

  void onView(const View& view) override;
  void onOver(const Error& why) override;
  // Begins a flush without an abort reason, if an operation is under way here. The flush supplies
  // both sides with the puts and messages that were lost with the connection.
  void onReconnected(int jobRank) override;

 private:
  friend class Renewal;
  // Intervals of waits that no doorbell ends: between looks at mapped words, and between questions.
  static constexpr auto kLookAtWords = std::chrono::milliseconds(1);
  static constexpr auto kAskAgain = std::chrono::milliseconds(20);
  static constexpr auto kMostPause = std::chrono::seconds(1);  // between questions

  // Holds the lock, and has told the machine how far the caller is. The destructor empties the
  // outbox.
  class SCOPED_CAPABILITY Step {
   public:
    explicit Step(FlushAgent& agent) ACQUIRE(agent.mutex_);
    ~Step() RELEASE() {
      agent_.outbox_.carryOut(agent_.mutex_);
      agent_.mutex_.unlock();
    }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    FlushAgent& agent_;
  };

  // The caller waits for a decision while this lives. The destructor notes how long the ranks that
  // were lost meanwhile have held up the call, from its beginning on.
  class Wait {
   public:
    Wait(FlushAgent& agent, Clock::time_point called);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    FlushAgent& agent_;
    const Clock::time_point called_;
  };

  void take(FlushActions actions) REQUIRES(mutex_);
  void take(FlushAction::Freeze freeze) REQUIRES(mutex_);
  void take(const FlushAction::End& end) REQUIRES(mutex_);
  void take(const FlushAction::Supply& supply) REQUIRES(mutex_);
  void take(FlushAction::GoOn& goOn) REQUIRES(mutex_);
  void take(FlushAction::Tell& tell) REQUIRES(mutex_);
  void take(FlushAction::LookUp) REQUIRES(mutex_) { owner_.ring(); }
  void take(FlushAction::Interrupt) REQUIRES(mutex_) { owner_.interruptAll(); }
  void take(FlushAction::Fail& failure) REQUIRES(mutex_) { owner_.fail(std::move(failure.why)); }
  void take(FlushAction::Note& note) REQUIRES(mutex_) { outbox_.add(std::move(note.text)); }
  void settle() REQUIRES(mutex_);
  void lookAgain() REQUIRES(mutex_);
  void awaitTick() REQUIRES(mutex_);
  void runAt(Deadline when, void (FlushAgent::*step)());

  Status beginSlowly(uint64_t number);
  Status awaitSlot(uint64_t number, bool isBusy);
  Status awaitDecision();
  Status awaitSkipped();
  bool haveEnded(const GroupRanks& ranks, uint64_t number) const;
  std::shared_ptr<const GroupView> viewOf(const SkippingOperation& operation) const
      REQUIRES(mutex_);
  Resolution awaitResolved(uint64_t number, FlushReport::AbortReason abort, Error why, Wish wish);
  bool awaitEnded(uint64_t number, Deadline deadline, Leavers leavers);
  Status sendLeave(Deadline deadline);
  void awaitLeaveSent(Deadline deadline);
  void tellSeriesEnd() REQUIRES(mutex_);
  bool missesLeaverSlowly(uint64_t number) const EXCLUDES(mutex_);
  uint64_t endedOf(int rank) const EXCLUDES(mutex_);
  FlushView viewOf(const View& job) const;
  // Returns the global ranks of these members.
  JobRanks toJobRanks(const GroupRanks& members) const;
  void onMessage(const EngineId& from, ByteView message);

  std::string nameRank(int rank) const {
    return nameRanks(std::span(&rank, 1), options_.globalRanks);
  }

  FlushOwner& owner_;
  Membership& membership_;
  const Options options_;
  std::map<EngineId, int> ranksById_;
  std::atomic<uint64_t>* const endedWord_;  // in our part of the window: peers may look

  std::atomic<bool> busy_{false};  // written by the caller; under the mutex while the caller waits
  // Written under the mutex.
  std::atomic<bool> frozen_{false};     // also true while we are left out of an operation
  std::atomic<bool> isLeftOut_{false};  // we are left out of the next operation
  std::atomic<bool> hasLeaver_{false};  // a member of view_ has left the group
  // Only for the caller's thread.
  uint64_t allBegan_ = 0;
  uint64_t begun_ = 0;
  bool isTaking_ = false;
  bool isWithout_ = false;  // the operation runs without the skipped ranks
  std::shared_ptr<const GroupView> skipped_;

  mutable Mutex mutex_;
  FlushMachine machine_ GUARDED_BY(mutex_);
  Attempt attempt_ GUARDED_BY(mutex_);  // copy of the machine's, for the caller
  // Of the operation under way, or of the next one.
  std::shared_ptr<const GroupView> view_ GUARDED_BY(mutex_);
  std::shared_ptr<const GroupView> allView_ GUARDED_BY(mutex_);  // of the operations after that one
  // The caller is in an operation, though it may not be busy.
  bool isResolving_ GUARDED_BY(mutex_) = false;
  bool isWaiting_ GUARDED_BY(mutex_) = false;  // the caller waits for a decision
  GroupRanks gone_ GUARDED_BY(mutex_);  // members that the decisions since then go on without
  bool isStopped_ GUARDED_BY(mutex_) = false;
  bool isLooking_ GUARDED_BY(mutex_) = false;  // the timer of lookAgain() is set
  bool isTicking_ GUARDED_BY(mutex_) = false;  // the timer of awaitTick() is set
  bool isEndTold_ GUARDED_BY(mutex_) = false;  // the owner knows that the series has ended
  FlushOutbox outbox_ GUARDED_BY(mutex_);
  Renewal renewal_;
};

}  // namespace mooncake
