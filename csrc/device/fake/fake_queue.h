#pragma once

#include <atomic>
#include <cstdint>
#include <set>

#include "base/mutex.h"

namespace mooncake {

// A queue of a fake device, as hardware has few of them for many streams. It issues the tasks of its
// streams in the order of the calls. A task is issued once the task before it on its stream has
// ended. A wait is at the head of the queue until it ends, so it holds up the queue's other streams.
// Any other task makes room for the next one as it begins. Thread-safe.
class FakeQueue {
 public:
  using Ticket = uint64_t;

  // Returns the place of a stream's next task.
  Ticket enter();
  // Waits until the task is at the head. Returns false if the stream is halted, which must call
  // wake() then.
  bool awaitHead(Ticket ticket, const std::atomic<bool>& isHalted);
  // The task makes room: it begins, its wait ends, or it never runs. Later calls do nothing.
  void pass(Ticket ticket);
  void wake();

 private:
  Mutex mutex_;
  Condition changed_;
  Ticket last_ GUARDED_BY(mutex_) = 0;
  Ticket head_ GUARDED_BY(mutex_) = 1;
  std::set<Ticket> passed_ GUARDED_BY(mutex_);  // behind the head
};

}  // namespace mooncake
