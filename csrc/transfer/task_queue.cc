#include "transfer/task_queue.h"

#include <algorithm>

namespace mooncake::transfer {

void TaskQueue::push(Batch* batch) {
  std::lock_guard lock(mutex_);
  if (batch->isQueued || batch->next == batch->submitted.load(std::memory_order_acquire)) return;
  batch->isQueued = true;
  enqueue(batch);
  ready_.notify_one();
}

void TaskQueue::enqueue(Batch* batch) {
  Segment* segment = batch->tasks[batch->next].request.segment.get();
  auto known = bySegment_.find(segment);
  if (known == bySegment_.end()) {
    lines_.push_back({segment, {}, 0});
    known = bySegment_.emplace(segment, std::prev(lines_.end())).first;
  }
  known->second->batches.push_back(batch);
}

std::optional<TaskQueue::Claim> TaskQueue::pop() {
  std::lock_guard lock(mutex_);
  const auto line =
      std::find_if(lines_.begin(), lines_.end(), [this](const Line& one) { return isReady(one); });
  if (line == lines_.end()) return std::nullopt;
  Batch* batch = line->batches.front();
  const Claim claim{batch, &batch->tasks[batch->next++]};
  ++line->underWay;
  const bool isAllBegun = batch->next == batch->submitted.load(std::memory_order_acquire);
  if (isAllBegun || batch->tasks[batch->next].request.segment.get() != line->segment) {
    line->batches.pop_front();
    batch->isQueued = !isAllBegun;
    if (!isAllBegun) enqueue(batch);
  }
  lines_.splice(lines_.end(), lines_, line);
  return claim;
}

void TaskQueue::ended(Segment* segment) {
  std::lock_guard lock(mutex_);
  const auto known = bySegment_.find(segment);
  const auto line = known->second;
  const bool wasFull = line->underWay-- == mostPerSegment_;
  if (wasFull && !line->batches.empty()) ready_.notify_one();
  if (line->underWay != 0 || !line->batches.empty()) return;
  lines_.erase(line);
  bySegment_.erase(known);
}

bool TaskQueue::anyReady() const {
  return std::any_of(lines_.begin(), lines_.end(),
                     [this](const Line& one) { return isReady(one); });
}

bool TaskQueue::isReady() const {
  std::lock_guard lock(mutex_);
  return anyReady();
}

bool TaskQueue::await() {
  std::unique_lock lock(mutex_);
  ready_.wait(lock, [this] { return isStopped_ || anyReady(); });
  return !isStopped_;
}

void TaskQueue::stop() {
  std::lock_guard lock(mutex_);
  isStopped_ = true;
  ready_.notify_all();
}

}  // namespace mooncake::transfer
