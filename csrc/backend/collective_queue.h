#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include <c10/util/intrusive_ptr.h>

#include "backend/collective_work.h"
#include "backend/completions.h"
#include "base/deadline.h"

namespace mooncake {

// Runs the collectives of one group one after the other, in the order of the calls: on the caller's
// thread when it is going to wait anyway, else on a thread of the group (started by its first
// asynchronous call), or on the thread of somebody who waits.
class CollectiveQueue {
 public:
  using Run = std::function<Status()>;

  explicit CollectiveQueue(std::shared_ptr<Completions> completions)
      : completions_(std::move(completions)) {}
  ~CollectiveQueue();  // runs what is left: abort the group first to make that quick

  template <typename R>
  void submit(const c10::intrusive_ptr<CollectiveWork>& work, bool async, R&& run) {
    if (!async && tryBegin()) {
      work->finish(run(), *completions_);
      finishedOne();
    } else {
      enqueue(work, Run(std::forward<R>(run)));
    }
  }

  // Until the work is finished: helps, without a deadline of its own (the operation has one).
  void help(const CollectiveWork& work);
  // Until the work is finished or the deadline has passed, as the result says. Does not help.
  bool await(const CollectiveWork& work, Deadline deadline);
  // Until everything that was called has ended or the deadline has passed.
  bool drain(Deadline deadline);

 private:
  struct Item {
    c10::intrusive_ptr<CollectiveWork> work;
    Run run;
  };

  bool tryBegin();  // true: nothing runs and nothing waits, the caller runs
  void finishedOne();
  void enqueue(c10::intrusive_ptr<CollectiveWork> work, Run run);
  void runFront(std::unique_lock<std::mutex>& lock);
  void runThread();

  const std::shared_ptr<Completions> completions_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool running_ = false;  // somebody runs an operation
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace mooncake
