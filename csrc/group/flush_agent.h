#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/deadline.h"
#include "base/wait.h"
#include "group/slot.h"
#include "membership/flush.h"
#include "membership/membership.h"

namespace mooncake {

class Group;

// Who takes part in an operation: the members of the group that are in the job's view.
struct GroupView {
  uint64_t epoch = 1;       // of the job's view
  std::vector<int> active;  // ranks of the group, ascending

  bool contains(int rank) const;
};

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

// A rank's half of the flush of one group (membership/flush.h): stops the caller, reports, decides,
// and has the caller go on. Whoever brings the last thing that is missing drives it: the engine's
// thread with a report, or the caller when it stops. So it needs no thread, and goes on while the
// caller is away.
class FlushAgent final : public Membership::Listener,
                         public std::enable_shared_from_this<FlushAgent> {
 public:
  // `jobRanks`: of the members, by their rank in the group. `topic` is the same on all members and
  // no other group's. Begins with start(), ends with stop().
  FlushAgent(Group& group, Membership& membership, uint64_t topic, std::vector<int> jobRanks,
             bool raises, bool founds);
  void start();
  void stop();

  // For the one thread that runs the group's operations. Between begin() and end() it is busy:
  // this rank reports nothing. Errors of begin(): how the operation was ended without us.
  Status begin(uint64_t number) {
    busy_.store(true, std::memory_order_relaxed);
    // Either we see `frozen`, or join() sees that we are busy.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!frozen_.load(std::memory_order_acquire) && ended() < number) return {};
    return beginSlowly(number);
  }
  // What the operation runs as. Constant while busy.
  Attempt attempt() const { return attempt_; }
  const std::shared_ptr<const GroupView>& view() const { return view_; }
  // The same for a caller that is not busy.
  std::shared_ptr<const GroupView> viewWhenIdle() const;
  // Any thread, any time.
  FlushState state() const;
  bool isFrozen() const { return frozen_.load(std::memory_order_acquire); }
  // A member that the view counts in has left the group before this operation: its part will never
  // come. resolve() then continues without that rank.
  bool missesLeaver(uint64_t number) const {
    return hasLeaver_.load(std::memory_order_acquire) && missesLeaverSlowly(number);
  }

  // Waits until everybody has left the slot that the operation is to use. ok too when frozen.
  Status awaitSlot(uint64_t number);
  // The caller has seen that all members have begun this operation, hence ended the one before.
  void allBegan(uint64_t number) { allBegan_ = number; }

  struct Resolution {
    enum class Kind {
      kAgain,  // starts again, as attempt()
      kTake,   // another rank has ended it well, as the attempt that it was: so can we
      kEnded,  // with this error, on all
    };
    Kind kind = Kind::kAgain;
    Status status;
    std::shared_ptr<const GroupView> view;  // kEnded: who goes on; null: this group does not
  };
  // The caller has stopped and touches nothing of the group any more: reports, with the reason if
  // it wants the operation to end, and waits for the decision. Busy again afterwards.
  Resolution resolve(uint64_t number, FlushReport::AbortReason abort, Error why);
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
  // Of what was put or reported to the rank, any part may be lost. If an operation is under way
  // here, a flush without an abort reason makes good for it, whoever of the two lacks something.
  void onReconnected(int jobRank) override;

 private:
  // kAsk is answered by kEnded. kRepeat is a report that was sent before and asks for the
  // receiver's, which has come to nobody here.
  enum class MessageKind : uint8_t { kReport = 1, kEnded, kLeft, kAsk, kRepeat };

  // What takes longer than an assignment. Done in this order, without the lock.
  struct Message {
    int to;
    MessageKind kind;
    Bytes body;
  };
  struct Part {
    int to;
    SlotCopy copy;
  };
  using Action = std::variant<Message, Part, std::string>;  // a string: for the log

  // Holds the lock; what the flush wants done is done when this goes.
  class Step {
   public:
    explicit Step(FlushAgent& agent) : agent_(agent), lock_(agent.mutex_) {}
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    FlushAgent& agent_;
    std::unique_lock<std::mutex> lock_;
  };

  void carryOut(std::unique_lock<std::mutex>& lock);
  bool perform(const Action& action);
  Status beginSlowly(uint64_t number);
  Status awaitDecision();
  Resolution awaitResolved(uint64_t number, FlushReport::AbortReason abort, Error why);
  void awaitLeaveSent(Deadline deadline);
  bool isSlotFree(uint64_t number) const;
  bool holdsSlot(int rank, uint64_t number) const;
  bool missesLeaverSlowly(uint64_t number) const;
  Attempt newest() const { return frozen_ ? target_ : attempt_; }
  uint32_t losses() const;
  bool isMissing(int rank) const;
  std::vector<int> lostRanks() const;
  void join(Attempt attempt, std::string_view why);
  void failForRounds(Attempt attempt);
  void onTimer(Clock::duration after, void (FlushAgent::*step)());
  void lookAgain();
  void reportIfIdle();
  void repeatLater();
  void repeat();
  std::chrono::milliseconds resendAfter() const;
  void report();
  FlushReport soFar(Attempt attempt);
  void decide();
  void act(const FlushDecision& decision, const std::vector<const FlushReport*>& reports);
  void supply(const FlushDecision& decision, const std::vector<const FlushReport*>& reports);
  void passOn(uint64_t number, int of, int to);
  void remember(uint64_t number, Error error);
  const Error* errorOf(uint64_t number) const;
  Error howEnded(uint64_t number) const;
  uint64_t endedOf(int rank) const;
  Error lostError() const;
  void tell(int rank, MessageKind kind, ByteView body);
  void tellAll(MessageKind kind, ByteView body);
  template <typename... Words>
  void note(const Attempt& attempt, const Words&... words);
  Bytes endedNow() const;
  void onMessage(const EngineId& from, ByteView message);
  void received(FlushReport report);
  void answer(int rank, Attempt attempt);

  Group& group_;
  Membership& membership_;
  const uint64_t topic_;
  const std::vector<int> jobRanks_;
  const bool raises_;
  const bool founds_;  // operation 1 is the beginning of the job: with all members or not at all
  uint32_t lostBefore_ = 0;  // members that were out of the job before the group was made
  std::map<EngineId, int> ranksById_;
  std::atomic<uint64_t>* const endedWord_;  // in our part of the window: peers may look

  std::atomic<bool> busy_{false};       // written by the caller, or under the mutex while it waits
  std::atomic<bool> frozen_{false};     // written under the mutex
  std::atomic<bool> hasLeaver_{false};  // " : one of view_ has left
  // The caller's own.
  uint64_t allBegan_ = 0;
  bool isTaking_ = false;

  mutable std::mutex mutex_;  // guards all below; attempt_ and view_ only change while frozen
  Attempt attempt_;           // of the last decision
  std::shared_ptr<const GroupView> view_;
  uint64_t viewEpoch_ = 1;
  std::vector<int> active_;   // ranks of the group in the job's last view, ascending
  std::vector<int> decided_;  // the same when the last flush was decided
  Attempt target_;            // of the flush under way, when frozen
  bool reported_ = false;     // for it
  Attempt reportedFor_;       // the last
  bool isResolving_ = false;  // the caller is in an operation, though it may not be busy
  Bytes lastReport_;          // for target_ or, when not frozen, attempt_
  Bytes leaveReport_;         // what we said when we left, if we have
  std::map<int, FlushReport> reports_;
  std::map<int, FlushReport> left_;     // of who has left the group: stands for its next report
  std::vector<uint64_t> knownEnded_;    // by rank, at least
  std::deque<FailedOperation> failed_;  // the last kRemembered, ascending
  uint64_t toTake_ = 0;                 // the operation in which our caller is behind
  FlushReport::AbortReason abortReason_ = FlushReport::AbortReason::kNone;
  uint64_t abortNumber_ = 0;
  Error why_;
  bool isStopped_ = false;
  bool isRepeating_ = false;  // a timer is set
  std::vector<Action> due_;
  bool isActing_ = false;         // a thread does what was due
  std::vector<int> leaveUnsent_;  // to whom the engine did not take our leave report
};

}  // namespace mooncake
