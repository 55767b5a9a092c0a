#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "base/signals.h"

namespace mooncake::transfer {

// A thread for what may take long and has no caller that waits. Started by the first task.
class Errands {
 public:
  using Task = std::function<void()>;
  ~Errands() { stop(); }

  void post(Task task) {
    std::lock_guard lock(mutex_);
    if (isStopped_) return;
    tasks_.push_back(std::move(task));
    if (!thread_.joinable()) {
      const BlockedSignals blocked;
      thread_ = std::thread([this] { run(); });
    }
    posted_.notify_one();
  }
  // What has not begun is dropped.
  void stop() {
    {
      std::lock_guard lock(mutex_);
      isStopped_ = true;
      tasks_.clear();
      posted_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      posted_.wait(lock, [this] { return isStopped_ || !tasks_.empty(); });
      if (isStopped_) return;
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;  // guards all below
  std::condition_variable posted_;
  std::deque<Task> tasks_;
  bool isStopped_ = false;
  std::thread thread_;
};

}  // namespace mooncake::transfer
