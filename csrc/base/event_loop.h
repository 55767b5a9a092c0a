#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "base/result.h"

namespace mooncake {

// A thread around epoll (level-triggered). Handlers run on the loop's thread, one at a time. A
// handler is called with the events that are pending (EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP).
// Signals are blocked on the thread (all but the signals of a crash), so that it never runs a
// signal handler of the application.
class EventLoop {
 public:
  using Handler = std::function<void(uint32_t events)>;
  using Task = std::function<void()>;

  static Result<std::unique_ptr<EventLoop>> start(
      const std::string& threadName);  // cut to 15 characters
  ~EventLoop();
  // Runs all posted tasks, and tasks that they post, then joins. Not on the loop's thread.
  void stop();

  // Any thread. The caller keeps the descriptor, and removes it before closing it.
  Status add(int fd, uint32_t events, Handler handler);
  Status modify(int fd, uint32_t events);
  // Returns when the handler does not run and will never run again. On the loop's own thread it
  // returns at once. The caller must not hold a lock that the handler takes. A descriptor that was
  // never added is fine.
  void remove(int fd);
  // Runs the task on the loop's thread as soon as the thread is free, in the order of posting.
  void post(Task task);
  // The same, and returns when the task has run. On the loop's thread the task runs at once.
  void runAndWait(const Task& task);
  // Any thread. Runs the task on the loop's thread once the deadline has passed, to the ms.
  using TimerId = uint64_t;
  TimerId runAt(Deadline when, Task task);
  // Drops the task unless it has already run. On the loop's thread only.
  void cancel(TimerId timer);
  bool onLoopThread() const;

 private:
  // The token distinguishes this registration from an earlier one with the same descriptor number:
  // an event of the earlier one may still be pending. The epoll event carries it; 0 is the loop's
  // own wake-up.
  struct Registration {
    uint32_t token;
    std::shared_ptr<Handler> handler;  // shared: a handler may remove itself while it runs
  };

  EventLoop() = default;
  void run() EXCLUDES(mutex_);
  void dispatch(int fd, uint32_t token, uint32_t events) EXCLUDES(mutex_);
  void runTasks(std::vector<Task>& scratch) EXCLUDES(mutex_);
  int millisecondsToFirstTimer() EXCLUDES(mutex_);
  void runTimers();
  void wake();

  Fd epoll_;
  Fd wake_;
  std::thread thread_;
  Mutex mutex_;
  Condition handlerDone_;  // running_ has changed
  std::unordered_map<int, Registration> handlers_ GUARDED_BY(mutex_);
  std::vector<Task> tasks_ GUARDED_BY(mutex_);
  std::map<std::pair<Clock::time_point, TimerId>, Task> timers_ GUARDED_BY(mutex_);
  TimerId lastTimer_ GUARDED_BY(mutex_) = 0;
  uint32_t lastToken_ GUARDED_BY(mutex_) = 0;
  uint32_t running_ GUARDED_BY(mutex_) = 0;  // token of the handler that runs now, else 0
  bool stopping_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
