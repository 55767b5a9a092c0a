#include "group/line_tasks.h"

#include <utility>

#include "base/thread.h"

namespace mooncake {

Status LineTasks::post(std::function<void()> task) {
  Lock lock(mutex_);
  if (isStopped_) return {};
  tasks_.push_back(std::move(task));
  changed_.notify_all();
  if (thread_.joinable()) return {};
  auto thread = startThread("mooncake-join", [this] { run(); });
  if (thread.ok()) thread_ = std::move(*thread);
  return thread.status();
}

bool LineTasks::isIdle() const {
  Lock lock(mutex_);
  return !isBusy_ && tasks_.empty();
}

void LineTasks::stop() {
  std::deque<std::function<void()>> dropped;  // ends without the lock: it may own groups
  {
    Lock lock(mutex_);
    isStopped_ = true;
    dropped.swap(tasks_);
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void LineTasks::run() {
  mutex_.lock();
  while (!isStopped_) {
    if (tasks_.empty()) {
      changed_.wait(mutex_);
      continue;
    }
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    isBusy_ = true;
    mutex_.unlock();
    task();
    task = nullptr;  // the last reference to a group may go with it
    mutex_.lock();
    isBusy_ = false;
  }
  mutex_.unlock();
}

}  // namespace mooncake
