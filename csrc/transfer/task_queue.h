#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "transfer/batch.h"

namespace mooncake::transfer {

// Tasks that wait for somebody to carry them out. Segments take turns, and each has at most so many
// of this queue under way: one that does not answer must not keep all others waiting. Any thread.
class TaskQueue {
 public:
  explicit TaskQueue(uint32_t mostPerSegment) : mostPerSegment_(mostPerSegment) {}

  struct Claim {
    Batch* batch;  // lives until this task has ended
    Task* task;
  };

  // What of it was submitted and not begun. More may be submitted while it stands here: push it
  // again.
  void push(Batch* batch);
  // Nothing: it is empty, or all segments that stand in it have enough under way. Whoever gets a
  // claim calls ended() for it.
  std::optional<Claim> pop();
  void ended(Segment* segment);
  bool isReady() const;  // to pop
  // Sleeps until it is. False: stopped.
  bool await();
  void stop();

 private:
  struct Line {
    Segment* segment;
    std::deque<Batch*> batches;
    uint32_t underWay = 0;
  };
  bool isReady(const Line& line) const {
    return !line.batches.empty() && line.underWay < mostPerSegment_;
  }
  bool anyReady() const;
  void enqueue(Batch* batch);

  const uint32_t mostPerSegment_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable ready_;
  std::list<Line> lines_;  // whose turn it is stands in front
  std::unordered_map<Segment*, std::list<Line>::iterator> bySegment_;
  bool isStopped_ = false;
};

}  // namespace mooncake::transfer
