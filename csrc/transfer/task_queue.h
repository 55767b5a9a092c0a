#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "transfer/batch.h"
#include "transfer/slot_pool.h"

namespace mooncake::transfer {

// Tasks that wait for a driver. Segments take turns. Any thread.
class TaskQueue {
 public:
  struct Claim {
    Batch* batch;  // lives until this task has ended
    Task* task;
    SlotPool::Slot slot;  // of the task's segment; the driver gives it
  };

  // What of it was submitted and not begun. More may be submitted while it stands here: push it
  // again.
  void push(Batch* batch);
  // Claims the next task whose segment gets a slot. Nothing if there is none.
  std::optional<Claim> pop(SlotPool& slots);
  bool isEmpty() const;
  // Sleeps until a task waits. False: stopped.
  bool await();
  void stop();

 private:
  struct Line {
    Segment* segment;
    std::deque<Batch*> batches;  // at least one
  };
  void enqueue(Batch* batch);

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable ready_;
  std::list<Line> lines_;  // whose turn it is stands in front
  std::unordered_map<Segment*, std::list<Line>::iterator> bySegment_;
  bool isStopped_ = false;
};

}  // namespace mooncake::transfer
