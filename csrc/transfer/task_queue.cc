#include "transfer/task_queue.h"

#include <algorithm>

namespace mooncake::transfer {

void TaskQueue::push(Batch* batch) {
  Lock lock(mutex_);
  if (batch->isQueued || batch->next == batch->submitted.load(std::memory_order_acquire)) return;
  batch->isQueued = true;
  enqueue(batch);
  ready_.notify_one();
}

void TaskQueue::enqueue(Batch* batch) {
  Segment* segment = batch->tasks[batch->next].request.segment.get();
  auto known = bySegment_.find(segment);
  if (known == bySegment_.end()) {
    lines_.push_back({segment, {}});
    known = bySegment_.emplace(segment, std::prev(lines_.end())).first;
  }
  known->second->batches.push_back(batch);
}

std::optional<TaskQueue::Claim> TaskQueue::pop(SlotPool& slots) {
  Lock lock(mutex_);
  auto slot = SlotPool::Slot::kNone;
  const auto line = std::find_if(lines_.begin(), lines_.end(), [&](const Line& one) {
    slot = slots.tryTake(one.segment->slots());
    return slot != SlotPool::Slot::kNone;
  });
  if (line == lines_.end()) return std::nullopt;
  Batch* batch = line->batches.front();
  const Claim claim{batch, &batch->tasks[batch->next++], slot};
  lines_.splice(lines_.end(), lines_, line);
  const bool isAllBegun = batch->next == batch->submitted.load(std::memory_order_acquire);
  if (isAllBegun || batch->tasks[batch->next].request.segment.get() != line->segment) {
    line->batches.pop_front();
    batch->isQueued = !isAllBegun;
    if (!isAllBegun) enqueue(batch);
    if (line->batches.empty()) {
      bySegment_.erase(line->segment);
      lines_.erase(line);
    }
  }
  return claim;
}

bool TaskQueue::isEmpty() const {
  Lock lock(mutex_);
  return lines_.empty();
}

bool TaskQueue::await() {
  Lock lock(mutex_);
  ready_.wait(mutex_, [this]() REQUIRES(mutex_) { return isStopped_ || !lines_.empty(); });
  return !isStopped_;
}

void TaskQueue::stop() {
  Lock lock(mutex_);
  isStopped_ = true;
  ready_.notify_all();
}

}  // namespace mooncake::transfer
