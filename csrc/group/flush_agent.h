#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/wait.h"
#include "group/flush_outbox.h"
#include "group/flush_owner.h"
#include "membership/flush_machine.h"
#include "membership/membership.h"
#include "membership/rank_set.h"

namespace mooncake {

// What an agent knows, for whoever debugs a hang (group_state.h).
struct FlushState {
  Attempt attempt;  // of the last decision
  bool isFrozen = false;
  Attempt target;            // of the flush under way, when frozen
  bool hasReported = false;  // for it
  bool isBusy = false;       // the caller is in an operation
  std::vector<int> missing;  // whose reports have not come, when frozen
  uint64_t viewEpoch = 1;
  std::vector<int> active;  // members of the job's view
  std::vector<int> left;    // have left the group
  std::vector<uint64_t>
      ended;  // by rank: its last ended operation, as far as it was said; at least
};

// The driver of FlushMachine, which decides: stops the caller, carries what is told, and has the
// caller go on. Whoever brings the last thing that is missing drives it: the engine's thread with a
// report, or the caller when it stops. So it needs no thread, and goes on while the caller is away.
class FlushAgent final : public Membership::Listener,
                         public std::enable_shared_from_this<FlushAgent> {
 public:
  struct Options {
    std::string group;
    int rank = 0;
    std::vector<int> jobRanks;  // of the members, by their rank in the group
    uint64_t topic = 0;         // the same on all members, and no other group's
    bool raises = false;
    bool founds = false;
    std::function<std::string(int)> nameRank;
  };

  // Begins with start(), ends with stop().
  FlushAgent(FlushOwner& owner, Membership& membership, Options options);
  void start();
  void stop();

  // For the one thread that runs the group's operations. Between begin() and end() it is busy:
  // this rank reports nothing. Errors of begin(): how the operation was ended without us; if it was
  // ended well, kInterrupted, and takeSkipped() says among whom.
  Status begin(uint64_t number) {
    busy_.store(true, std::memory_order_relaxed);
    // Either we see `frozen`, or who freezes sees that we are busy.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!frozen_.load(std::memory_order_acquire) && ended() < number) return {};
    return beginSlowly(number);
  }
  std::shared_ptr<const GroupView> takeSkipped() { return std::exchange(skipped_, nullptr); }
  // The caller publishes that it is in the operation.
  void begins(uint64_t number) { begun_ = number; }
  // What the operation runs as. Constant while busy.
  Attempt attempt() const { return attempt_; }
  const std::shared_ptr<const GroupView>& view() const { return view_; }
  // The same for a caller that is not busy, of its next operations: nobody is skipped.
  std::shared_ptr<const GroupView> viewWhenIdle() const;
  // Any thread, any time.
  FlushState state() const;
  // The caller is to look up, or begins nothing.
  bool isFrozen() const { return frozen_.load(std::memory_order_acquire); }
  // A member that the view counts in has left the group before this operation: its part will never
  // come. resolve() then continues without that rank.
  bool missesLeaver(uint64_t number) const {
    return hasLeaver_.load(std::memory_order_acquire) && missesLeaverSlowly(number);
  }

  // Waits until everybody has left the slot that the operation is to use. kInterrupted: frozen.
  Status awaitSlot(uint64_t number);
  // The same before begin(), frozen or not.
  Status awaitSlotBefore(uint64_t number) { return awaitSlot(number, false); }
  // The caller has seen that all members, and nobody was skipped, have begun this operation, hence
  // ended the one before.
  void allBegan(uint64_t number) { allBegan_ = number; }

  struct Resolution {
    enum class Kind {
      kAgain,    // starts again, as attempt()
      kTake,     // another rank has ended it well, as the attempt that it was: so can we
      kEnded,    // with this error, on all
      kSkipped,  // well, on all, among those of `view`: we had not begun it
    };
    Kind kind = Kind::kAgain;
    Status status;
    std::shared_ptr<const GroupView> view;  // kEnded: who goes on; null: this group does not
  };
  enum class Wish { kNone, kSkip };  // kSkip: go on without those who have not begun it
  // The caller has stopped and touches nothing of the group any more: reports, with the reason if
  // it wants the operation to end, and waits for the decision. Busy again afterwards. `called`:
  // when the operation was.
  Resolution resolve(uint64_t number, Clock::time_point called, FlushReport::AbortReason abort,
                     Error why, Wish wish = Wish::kNone);
  // The operation has ended here. Nothing of the group is touched any more.
  void end(uint64_t number, const Status& status);

  uint64_t ended() const { return endedWord_->load(std::memory_order_relaxed); }

  // Still in the last view and has not left the group.
  bool isActive(int rank) const;
  // Until every other member has ended this operation, or is gone, or the deadline has passed; then
  // tells them that we need not be asked any more.
  void leave(uint64_t number, Deadline deadline);
  // The first half of it.
  void awaitEnded(uint64_t number, Deadline deadline);
  // Of the members that were in and are not any more, those that the job has lost are missed here.
  void noteMissed(const GroupView& before, const GroupView& now);

  void onView(const View& view) override;
  void onOver(const Error& why) override;
  // If an operation is under way here, a flush without an abort reason makes good for what was lost
  // with the connection, whoever of the two lacks something.
  void onReconnected(int jobRank) override;

 private:
  // While something is awaited that nobody rings for: between looks at words that are mapped, and
  // between questions.
  static constexpr auto kLookAtWords = std::chrono::milliseconds(1);
  static constexpr auto kAskAgain = std::chrono::milliseconds(20);

  // Holds the lock, and the machine knows how far the caller is; what is due is done when this
  // goes.
  class Step {
   public:
    explicit Step(FlushAgent& agent);
    ~Step() { agent_.outbox_.carryOut(lock_); }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    FlushAgent& agent_;
    std::unique_lock<std::mutex> lock_;
  };

  // The caller waits for a decision while this lives. What it waited for each rank that is lost by
  // then is noted: from when it called the operation.
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

  void take(FlushActions actions);
  void take(FlushAction::Freeze freeze);
  void take(const FlushAction::End& end);
  void take(const FlushAction::Supply& supply);
  void take(FlushAction::GoOn& goOn);
  void take(FlushAction::Tell& tell);
  void take(FlushAction::LookUp) { owner_.ring(); }
  void take(FlushAction::Interrupt) { owner_.interruptAll(); }
  void take(FlushAction::Fail& failure) { owner_.fail(std::move(failure.why)); }
  void take(FlushAction::Note& note) { outbox_.add(std::move(note.text)); }
  void settle();
  void lookAgain();
  void awaitTick();
  void runAt(Deadline when, void (FlushAgent::*step)());

  Status beginSlowly(uint64_t number);
  Status awaitSlot(uint64_t number, bool isBusy);
  Status awaitDecision();
  Status awaitSkipped();
  bool haveEnded(const RankSet& ranks, uint64_t number) const;
  std::shared_ptr<const GroupView> viewOf(const SkippingOperation& operation) const;
  Resolution awaitResolved(uint64_t number, FlushReport::AbortReason abort, Error why, Wish wish);
  void awaitLeaveSent(Deadline deadline);
  bool missesLeaverSlowly(uint64_t number) const;
  uint64_t endedOf(int rank) const;
  FlushView viewOf(const View& job) const;
  void onMessage(const EngineId& from, ByteView message);

  FlushOwner& owner_;
  Membership& membership_;
  const Options options_;
  std::map<EngineId, int> ranksById_;
  std::atomic<uint64_t>* const endedWord_;  // in our part of the window: peers may look

  std::atomic<bool> busy_{false};       // written by the caller, or under the mutex while it waits
  std::atomic<bool> frozen_{false};     // written under the mutex; also while we are left out
  std::atomic<bool> isLeftOut_{false};  // " : of the next operation
  std::atomic<bool> hasLeaver_{false};  // " : one of view_ has left
  // The caller's own.
  uint64_t allBegan_ = 0;
  uint64_t begun_ = 0;
  bool isTaking_ = false;
  bool isWithout_ = false;  // the operation runs without some
  std::shared_ptr<const GroupView> skipped_;

  mutable std::mutex mutex_;  // guards all below; attempt_ and view_ only change while frozen
  FlushMachine machine_;
  Attempt attempt_;                           // the machine's, for the caller
  std::shared_ptr<const GroupView> view_;     // of the next operation, or of the one under way
  std::shared_ptr<const GroupView> allView_;  // of those behind it
  bool isResolving_ = false;  // the caller is in an operation, though it may not be busy
  bool isWaiting_ = false;    // the caller waits for a decision
  RankSet gone_;              // ranks of the job that the decisions meanwhile go on without
  bool isStopped_ = false;
  bool isLooking_ = false;  // a timer is set
  bool isTicking_ = false;  // another one
  FlushOutbox outbox_;
};

}  // namespace mooncake
