#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include <c10/util/intrusive_ptr.h>

#include "backend/active_ranks.h"
#include "backend/collective_work.h"
#include "backend/completion_hooks.h"
#include "backend/completions.h"
#include "backend/loss.h"
#include "backend/signals.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "group/group_line.h"

namespace mooncake {

// Runs the collectives of one group one after the other, in the order of the calls: on the caller's
// thread when it is going to wait anyway, else on a thread of the group (started by its first
// asynchronous call), or on the thread of somebody who waits.
//
// Mode `raise`: a loss ends one operation of the group, on every rank that has lived on. How far a
// caller had gone on calling other operations differs from rank to rank: these operations end
// here with the same error and take no number of the group's, until a thread that calls them has
// seen it. So all ranks go on with the first operation that is called afterwards.
//
// Each operation tells the other ranks how many calls were made since the loss, including calls
// that ended with it. Ranks that go on with different calls differ in it, and the operation ends as
// a mismatch. acknowledgeLoss() begins the count again, for programs that cannot make as many calls
// on all ranks.
class CollectiveQueue {
 public:
  // Runs the operation in the series that it falls into.
  using Run = std::function<Status(Group& series)>;

  // The line outlives stop(). `raises`: mode `raise`.
  CollectiveQueue(GroupLine& line, bool raises, std::shared_ptr<Completions> completions,
                  std::shared_ptr<CompletionHooks> hooks,
                  std::shared_ptr<const ActiveRanks> activeRanks);
  ~CollectiveQueue();
  // Runs what is left (fail the group first to make that quick) and refuses whatever comes later.
  // The group may go then; not if false: an operation runs still. Callers in help() and await()
  // have nothing left to wait for, and use nothing but this object, which their Work keeps.
  bool stop(Deadline deadline);

  template <typename R>
  void submit(const c10::intrusive_ptr<CollectiveWork>& work, bool async, R&& run) {
    if (!async && !CallbackScope::isActive() && tryBegin(*work)) {
      const OperationInterrupt interrupt(line_);
      end(work, outcomeOf(*work, run));
      finishedOne();
      interrupt.rethrow();
    } else {
      enqueue(work, Run(std::forward<R>(run)));
    }
  }

  // All that wait here run signal handlers meanwhile, and rethrow what these raise. Nobody can say
  // then how the operation would have ended, here and on the other ranks: the group is over.
  //
  // Until the work is finished: helps, without a deadline of its own (the operation has one).
  void help(const CollectiveWork& work);
  // Until the work is finished or the deadline has passed, as the result says. Does not help.
  bool await(const CollectiveWork& work, Deadline deadline);
  // Until everything that was called has ended or the deadline has passed.
  bool drain(Deadline deadline);
  // Goes on to the line's next series, between two operations, if the current one has ended.
  void moveOn() EXCLUDES(mutex_);
  // The same, unless an operation runs: its thread does it then. Returns whether it looked.
  bool tryMoveOn() EXCLUDES(mutex_);
  // How many operations were called since the last loss that the caller has seen.
  uint64_t called();
  // Marks the last loss as seen, and begins the count of calls again. Waits until earlier calls and
  // callbacks have ended. Returns false if there was no loss since the last time. Throws when the
  // deadline passes.
  bool acknowledgeLoss(Deadline deadline);
  // Whether this thread runs or awaits an operation of any group. Asked by a signal handler, which
  // has interrupted it: the groups must outlive the handler then.
  static bool isCallerInside();
  const std::shared_ptr<Completions>& completions() const { return completions_; }
  // Origin of a callback of a work of this queue that was called in that era.
  CallbackOrigin origin(uint64_t era) const { return {this, era, attached_}; }

 private:
  struct Item {
    c10::intrusive_ptr<CollectiveWork> work;
    Run run;
  };

  class OperationInterrupt final : public Interruptible {
   public:
    explicit OperationInterrupt(GroupLine& line) : line_(line) { ++alive; }
    ~OperationInterrupt() { --alive; }

    // Number of these on the calling thread, of any group.
    static thread_local int alive;

   private:
    void giveUp(const std::string& why) override;
    GroupLine& line_;
  };
  void sleep(OperationInterrupt& interrupt, Deadline deadline) REQUIRES(mutex_);

  // Runs it. What torch throws while it takes over results is the operation's own error: it must
  // neither end a thread nor leave the queue running for ever.
  template <typename R>
  Status outcomeOf(const CollectiveWork& work, R& run) {
    try {
      for (;;) {
        Status status = run(*series_);
        if (status.code() != ErrorCode::kMoved || !beginSeries(&work)) return status;
      }
    } catch (const std::exception& error) {
      return failureOf(work, error);
    }
  }
  static Status failureOf(const CollectiveWork& work, const std::exception& error);
  bool beginSeries(const CollectiveWork* next) EXCLUDES(mutex_);
  // True: nothing runs and nothing waits, the caller runs.
  bool tryBegin(CollectiveWork& work) EXCLUDES(mutex_);
  void end(const c10::intrusive_ptr<CollectiveWork>& work, Status status) EXCLUDES(mutex_);
  void finishedOne() EXCLUDES(mutex_);
  void enqueue(c10::intrusive_ptr<CollectiveWork> work, Run run) EXCLUDES(mutex_);
  void tellWaiting() EXCLUDES(mutex_);
  void runFront() REQUIRES(mutex_);
  void runThread() EXCLUDES(mutex_);
  bool isHeld() REQUIRES(mutex_);
  void release() REQUIRES(mutex_);
  void number(CollectiveWork& work) REQUIRES(mutex_);
  void begins(const CollectiveWork& work) REQUIRES(mutex_);
  void noteUncounted(const CollectiveWork& work) EXCLUDES(mutex_);
  void letGo(Item item);

  GroupLine& line_;
  const bool raises_;
  const std::shared_ptr<Completions> completions_;
  const std::shared_ptr<CompletionHooks> hooks_;
  const std::shared_ptr<const ActiveRanks> activeRanks_;
  // See CallbackOrigin.
  const std::shared_ptr<std::atomic<size_t>> attached_ = std::make_shared<std::atomic<size_t>>(0);
  Group* series_;                              // of whoever runs an operation
  std::shared_ptr<const GroupView> lastView_;  // of whoever runs an operation
  uint64_t numberBefore_ = 0;                  // of the group, before the operation that runs
  Mutex mutex_;
  Condition changed_;
  std::deque<Item> items_ GUARDED_BY(mutex_);
  uint64_t called_ GUARDED_BY(mutex_) = 0;
  // What issued work ends with until the caller has seen its loss.
  std::optional<Ending> held_ GUARDED_BY(mutex_);
  std::optional<Ending> last_ GUARDED_BY(mutex_);  // the last loss
  bool isAcknowledged_ GUARDED_BY(mutex_) = true;  // that one was
  uint64_t era_ GUARDED_BY(mutex_) = 0;            // losses that were seen or acknowledged
  uint64_t position_ GUARDED_BY(mutex_) = 0;       // calls, without callbacks' calls
  uint64_t lossPosition_ GUARDED_BY(mutex_) = 0;   // of the call that the last loss ended
  // In this era.
  std::shared_ptr<Issuers> issuers_ GUARDED_BY(mutex_) = std::make_shared<Issuers>();
  uint64_t lastIssuer_ GUARDED_BY(mutex_) = 0;  // one of them; 0: none
  bool running_ GUARDED_BY(mutex_) = false;     // somebody runs an operation
  bool stopping_ GUARDED_BY(mutex_) = false;
  // Started with the lock. stop() joins it without: no thread starts once stopping_ is set.
  std::thread thread_;
};

}  // namespace mooncake
