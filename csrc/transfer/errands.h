#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/thread.h"

namespace mooncake::transfer {

// Threads for tasks that may take long and that no caller waits for. They start on demand,
// `mostThreads` at most. Any thread may post.
class Errands {
 public:
  using Task = std::function<void()>;
  explicit Errands(size_t mostThreads = 1) : mostThreads_(mostThreads) {}
  ~Errands() { stop(); }

  // kExhausted: no thread exists yet and none could be started.
  Status post(Task task) {
    Lock lock(mutex_);
    if (isStopped_) return {};
    if (idle_ <= tasks_.size() && threads_.size() < mostThreads_) {
      auto thread = startThread("mooncake-errand", [this] { run(); });
      if (thread.ok()) {
        threads_.push_back(std::move(*thread));
      } else if (threads_.empty()) {
        return thread.error();
      }
    }
    tasks_.push_back(std::move(task));
    posted_.notify_one();
    return {};
  }
  // Drops the tasks that have not begun, and waits for running tasks.
  void stop() {
    std::vector<std::thread> threads;
    {
      Lock lock(mutex_);
      isStopped_ = true;
      tasks_.clear();
      threads.swap(threads_);
      posted_.notify_all();
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  void run() {
    Lock lock(mutex_);
    for (;;) {
      ++idle_;
      posted_.wait(mutex_, [this]() REQUIRES(mutex_) { return isStopped_ || !tasks_.empty(); });
      --idle_;
      if (isStopped_) return;
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  const size_t mostThreads_;
  Mutex mutex_;
  Condition posted_;
  std::deque<Task> tasks_ GUARDED_BY(mutex_);
  size_t idle_ GUARDED_BY(mutex_) = 0;
  bool isStopped_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ GUARDED_BY(mutex_);
};

}  // namespace mooncake::transfer
