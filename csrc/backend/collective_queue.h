#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include <c10/util/intrusive_ptr.h>

#include "backend/collective_work.h"
#include "backend/completion_hooks.h"
#include "backend/completions.h"
#include "backend/loss.h"
#include "backend/signals.h"
#include "base/deadline.h"
#include "group/group.h"

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
  using Run = std::function<Status()>;

  // The group outlives stop(). `raises`: mode `raise`.
  CollectiveQueue(Group& group, bool raises, std::shared_ptr<Completions> completions,
                  std::shared_ptr<CompletionHooks> hooks);
  ~CollectiveQueue();
  // Runs what is left (fail the group first to make that quick) and refuses whatever comes later.
  // The group may go then; not if false: an operation runs still. Callers in help() and await()
  // have nothing left to wait for, and use nothing but this object, which their Work keeps.
  bool stop(Deadline deadline);

  template <typename R>
  void submit(const c10::intrusive_ptr<CollectiveWork>& work, bool async, R&& run) {
    if (!async && !CallbackScope::isActive() && tryBegin(*work)) {
      const OperationInterrupt interrupt(group_);
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
    explicit OperationInterrupt(Group& group) : group_(group) { ++alive; }
    ~OperationInterrupt() { --alive; }

    // Number of these on the calling thread, of any group.
    static thread_local int alive;

   private:
    void giveUp(const std::string& why) override;
    Group& group_;
  };
  void sleep(std::unique_lock<std::mutex>& lock, OperationInterrupt& interrupt, Deadline deadline);

  // Runs it. What torch throws while it takes over results is the operation's own error: it must
  // neither end a thread nor leave the queue running for ever.
  template <typename R>
  static Status outcomeOf(const CollectiveWork& work, R& run) {
    try {
      return run();
    } catch (const std::exception& error) {
      return failureOf(work, error);
    }
  }
  static Status failureOf(const CollectiveWork& work, const std::exception& error);
  bool tryBegin(CollectiveWork& work);  // true: nothing runs and nothing waits, the caller runs
  void end(const c10::intrusive_ptr<CollectiveWork>& work, Status status);
  void finishedOne();
  void enqueue(c10::intrusive_ptr<CollectiveWork> work, Run run);
  void tellWaiting();
  void runFront(std::unique_lock<std::mutex>& lock);
  void runThread();
  bool isHeld();
  void release();
  void number(CollectiveWork& work);
  void begins(const CollectiveWork& work);
  void noteUncounted(const CollectiveWork& work);
  void letGo(Item item);

  Group& group_;
  const bool raises_;
  const std::shared_ptr<Completions> completions_;
  const std::shared_ptr<CompletionHooks> hooks_;
  // See CallbackOrigin.
  const std::shared_ptr<std::atomic<size_t>> attached_ = std::make_shared<std::atomic<size_t>>(0);
  std::shared_ptr<const GroupView> lastView_;  // of whoever runs an operation
  uint64_t numberBefore_ = 0;                  // of the group, before the operation that runs
  std::mutex mutex_;                           // guards everything below
  std::condition_variable changed_;
  std::deque<Item> items_;
  uint64_t called_ = 0;
  std::optional<Ending> held_;  // what issued work ends with until the caller has seen its loss
  std::optional<Ending> last_;  // the last loss
  bool isAcknowledged_ = true;  // that one was
  uint64_t era_ = 0;            // losses that were seen or acknowledged
  uint64_t position_ = 0;       // calls, without callbacks' calls
  uint64_t lossPosition_ = 0;   // of the call that the last loss ended
  std::shared_ptr<Issuers> issuers_ = std::make_shared<Issuers>();  // in this era
  uint64_t lastIssuer_ = 0;                                         // one of them; 0: none
  bool running_ = false;                                            // somebody runs an operation
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace mooncake
