#include "backend/collective_queue.h"

#include <pthread.h>

namespace mooncake {

CollectiveQueue::~CollectiveQueue() {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool CollectiveQueue::tryBegin() {
  std::lock_guard lock(mutex_);
  if (running_ || !items_.empty()) return false;
  running_ = true;
  return true;
}

void CollectiveQueue::finishedOne() {
  std::lock_guard lock(mutex_);
  running_ = false;
  changed_.notify_all();
}

void CollectiveQueue::enqueue(c10::intrusive_ptr<CollectiveWork> work, Run run) {
  std::lock_guard lock(mutex_);
  items_.push_back({std::move(work), std::move(run)});
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { runThread(); });
    pthread_setname_np(thread_.native_handle(), "mooncake-async");
  }
  changed_.notify_all();
}

void CollectiveQueue::runFront(std::unique_lock<std::mutex>& lock) {
  Item item = std::move(items_.front());
  items_.pop_front();
  running_ = true;
  lock.unlock();
  item.work->finish(item.run(), *completions_);
  // The last references to tensors may die with the item, and their Python halves need Python's
  // lock.
  completions_->post([item = std::make_shared<Item>(std::move(item))] {});
  lock.lock();
  running_ = false;
  changed_.notify_all();
}

void CollectiveQueue::runThread() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !running_ && (stopping_ || !items_.empty()); });
    if (items_.empty()) return;
    runFront(lock);
  }
}

void CollectiveQueue::help(const CollectiveWork& work) {
  std::unique_lock lock(mutex_);
  while (!work.finished()) {
    if (!running_ && !items_.empty()) {
      runFront(lock);
    } else {
      changed_.wait(lock);
    }
  }
}

bool CollectiveQueue::await(const CollectiveWork& work, Deadline deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline.when(), [&] { return work.finished(); });
}

bool CollectiveQueue::drain(Deadline deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline.when(), [&] { return !running_ && items_.empty(); });
}

}  // namespace mooncake
