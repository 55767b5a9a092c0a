#pragma once

#include <deque>
#include <list>
#include <optional>
#include <unordered_map>

#include "base/mutex.h"
#include "transfer/batch.h"
#include "transfer/slot_pool.h"

namespace mooncake::transfer {

// Tasks that no driver has claimed yet. Segments take turns. Any thread.
class TaskQueue {
 public:
  struct Claim {
    Batch* batch;  // lives until this task has ended
    Task* task;
    SlotPool::Slot slot;  // of the task's segment; the driver returns it to the pool
  };

  // Queues the submitted tasks of a batch that are not claimed. Call it after every submission,
  // also while the batch is queued.
  void push(Batch* batch);
  // Claims the next task whose segment gets a slot; empty if no segment gets one.
  std::optional<Claim> pop(SlotPool& slots);
  bool isEmpty() const;
  // Blocks until a task waits. Returns false once stopped.
  bool await();
  void stop();

 private:
  struct Line {
    Segment* segment;
    std::deque<Batch*> batches;  // at least one
  };
  void enqueue(Batch* batch) REQUIRES(mutex_);

  mutable Mutex mutex_;
  Condition ready_;
  std::list<Line> lines_ GUARDED_BY(mutex_);  // the segment whose turn is next is in front
  std::unordered_map<Segment*, std::list<Line>::iterator> bySegment_ GUARDED_BY(mutex_);
  bool isStopped_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake::transfer
