#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "base/result.h"
#include "group/group.h"
#include "kernels/group_state.h"
#include "peers/decision_words.h"
#include "peers/peer_verdict.h"

namespace mooncake {

// The ranks of a group that are in the job, as its onView tells them. Thread-safe.
class ViewFeed {
 public:
  void show(const GroupView& view);
  uint64_t active() const;  // bits of ranks
  // `changed` is called after each show(), on its thread. Null: no function.
  void listen(std::function<void()> changed);

 private:
  mutable Mutex mutex_;
  uint64_t active_ GUARDED_BY(mutex_) = ~uint64_t(0);
  std::function<void()> changed_ GUARDED_BY(mutex_);
};

// Decides for kernels that miss a rank. When ranks are lost, the guards of the survivors stop their
// kernels and agree, by an operation of `control`, on the last operation that any of them has
// ended: that one is ended with all its ranks everywhere, and later ones go on without the lost
// ranks. If a kernel wants to skip late ranks, its guard calls the other guards, and all do the
// same. An operation that exceeds its timeout ends the group. Thread-safe.
class PeerGuard {
 public:
  struct Functions {
    // Enqueues the kernel that stops the device's kernels between two operations.
    std::function<Status()> acknowledge;
    // That kernel has a stream of its own. Otherwise it comes behind the kernels of all calls.
    bool isBeside = false;
    // See PeerProxy::endsOf().
    std::function<std::string(uint64_t ranks)> endsOf;
    // Called before kernels go on without lost ranks, with bits of the ranks left. May wait for
    // the device. An error ends the group.
    std::function<Status(uint64_t active)> onLoss;
  };

  // `control` is used by the guard alone, and `view` is its view. All outlive the guard. Kernels
  // begin with the ranks of its last operation. `banks`: see kernels::GroupState.
  static Result<std::unique_ptr<PeerGuard>> make(Group& control, ViewFeed& view,
                                                 kernels::HostWords& words, unsigned banks,
                                                 Functions functions,
                                                 std::chrono::milliseconds timeout);
  // Ends the thread. Kernels that still wait for a decision get a refusal, and so do all later
  // ones.
  ~PeerGuard();

  // From here on the guard uses the control group. Before, its maker does.
  void arm();
  // A call is about to enqueue its operation. Returns the call's number, or the error that has
  // ended the group. Operations that graphs replay have none: the guard learns of them when they
  // wait.
  Result<uint64_t> begin(std::string name, Deadline deadline);
  // Sets the deadline of a call that begin() was given none for.
  void limit(uint64_t call, Deadline deadline);
  // Ends the group with this error, unless it has ended.
  void fail(Error why);
  // Ok, or the error that has ended the group.
  Status usable() const;
  uint64_t lastCall() const;
  bool hasEnded(uint64_t call) const;
  // Waits until the call's operation has ended, or returns the error that has ended the group.
  Status await(uint64_t call, Deadline deadline) const;
  // Bits of the ranks that took part in a call's operation that has ended. A rank that is not among
  // them before the end does not become one.
  uint64_t contributors(uint64_t call) const;
  // Epoch of the view of these ranks, which contributors() has returned.
  uint64_t epochOf(uint64_t contributors) const;
  // The error of an operation that has no result, because it ends without its root.
  Error rootLost(int root) const;

 private:
  struct Called {
    uint64_t number;
    std::string name;
    Deadline deadline;
  };
  // An operation of a graph that waits for a rank.
  struct Parked {
    uint64_t number = 0;
    Deadline deadline = Deadline::at(Clock::time_point::max());
  };
  // An operation with a kernel that waits for ranks, and may skip them.
  struct Waiting {
    uint64_t number = 0;
    Clock::time_point since;
  };

  PeerGuard(Group& control, ViewFeed& view, kernels::HostWords& words, unsigned banks,
            Functions functions, std::chrono::milliseconds timeout);

  void run() EXCLUDES(mutex_);
  // awaitEvent(), checkTimeouts(), settle(), stopKernels() and timedOut() give the lock back while
  // they wait.
  void awaitEvent() REQUIRES(mutex_);
  uint64_t done() const;   // number of the last operation that has ended, of a call or a graph
  uint64_t ended() const;  // number of calls that have ended on the device
  Status checkTimeouts() REQUIRES(mutex_);
  bool hasLost() const REQUIRES(mutex_) { return (active_ & ~view_.active()) != 0; }
  uint64_t lateOperation() REQUIRES(mutex_);
  bool isCalled() const REQUIRES(mutex_) {
    return calledFor_.load(std::memory_order_acquire) == rounds_ + 1;
  }
  void callOthers() REQUIRES(mutex_);
  void call(int rank, uint64_t round) const;
  void onCalled(ByteView message);
  void settle(uint64_t late) REQUIRES(mutex_);
  Status stopKernels(Deadline deadline) REQUIRES(mutex_);
  void refuse(Error why) REQUIRES(mutex_);
  Status failure() const REQUIRES(mutex_);  // ok, or the error that has ended the group
  Status failureOfKernels() const REQUIRES(mutex_);
  Error timedOut(const std::string& name) REQUIRES(mutex_);

  Group& control_;
  ViewFeed& view_;
  kernels::HostWords& words_;
  const unsigned banks_;
  const Functions functions_;
  const std::chrono::milliseconds timeout_;
  const uint64_t first_;  // bits of the ranks with which kernels begin
  mutable Mutex mutex_;
  mutable Condition changed_;
  DecisionWords<> decisions_ GUARDED_BY(mutex_);
  std::deque<Called> called_ GUARDED_BY(mutex_);  // calls that may not have ended on the device
  Parked parked_ GUARDED_BY(mutex_);
  Waiting waiting_ GUARDED_BY(mutex_);
  uint64_t lastCalled_ GUARDED_BY(mutex_) = 0;
  uint64_t active_ GUARDED_BY(mutex_);                      // as agreed last
  std::map<uint64_t, uint64_t> epochs_ GUARDED_BY(mutex_);  // of views, by the bits of their ranks
  uint64_t skipped_ GUARDED_BY(mutex_) = 0;  // as decided last; see kernels::HostWords
  uint64_t settled_ GUARDED_BY(mutex_) = 0;  // an operation that has gone on without late ranks
  uint64_t rounds_ GUARDED_BY(mutex_) = 0;   // agreements, the same on all ranks
  bool isArmed_ GUARDED_BY(mutex_) = false;
  bool isStopping_ GUARDED_BY(mutex_) = false;
  std::optional<Error> failure_ GUARDED_BY(mutex_);
  std::atomic<uint64_t> calledFor_{0};  // the last agreement to which another rank has called
  std::atomic<uint64_t> calls_{0};      // and the last one to which this rank has called
  std::thread thread_;
};

}  // namespace mooncake
