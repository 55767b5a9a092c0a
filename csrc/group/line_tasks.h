#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "base/mutex.h"
#include "base/result.h"

namespace mooncake {

// What a line of a group does in the background, one task after the other on one thread, which the
// first task starts.
class LineTasks {
 public:
  LineTasks() = default;
  ~LineTasks() { stop(); }
  LineTasks(const LineTasks&) = delete;
  LineTasks& operator=(const LineTasks&) = delete;

  // An error: the system starts no thread; the task waits for the next one. After stop() it is dropped.
  Status post(std::function<void()> task) EXCLUDES(mutex_);
  // Whether no task runs or waits.
  bool isIdle() const EXCLUDES(mutex_);
  // Waits for the task that runs, drops the tasks that wait, and ends the thread.
  void stop() EXCLUDES(mutex_);

 private:
  void run() EXCLUDES(mutex_);

  mutable Mutex mutex_;
  Condition changed_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  bool isBusy_ GUARDED_BY(mutex_) = false;  // a task runs
  bool isStopped_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace mooncake
