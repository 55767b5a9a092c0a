#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/result.h"

namespace mooncake {

// A thread around epoll (level-triggered). Handlers run on the loop's thread, one at a time. A
// handler is called with the events that are pending (EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP).
// Signals are blocked on the thread (all but those of a crash), so that it never runs a signal
// handler of the application.
class EventLoop {
 public:
  using Handler = std::function<void(uint32_t events)>;
  using Task = std::function<void()>;

  static Result<std::unique_ptr<EventLoop>> start(
      const std::string& threadName);  // 15 characters are kept
  ~EventLoop();
  // Runs what was posted, and what that posts, then joins. Not on the loop's thread.
  void stop();

  // Any thread. The descriptor stays the caller's, who removes it before closing it.
  Status add(int fd, uint32_t events, Handler handler);
  Status modify(int fd, uint32_t events);
  // Returns when the handler does not run and will never run again (at once on the loop's own
  // thread). The caller must not hold a lock that the handler takes. A descriptor that was never
  // added is fine.
  void remove(int fd);
  // Runs the task on the loop's thread as soon as it is free, in the order of posting.
  void post(Task task);
  // Runs the task on the loop's thread when the deadline has passed, to the millisecond. Any
  // thread.
  using TimerId = uint64_t;
  TimerId runAt(Deadline when, Task task);
  // On the loop's thread: the task does not run any more, if it has not.
  void cancel(TimerId timer);
  bool onLoopThread() const;

 private:
  // The token tells this registration from an earlier one of the same descriptor number, of which
  // an event may still be on its way. It travels in the epoll event; 0 is the loop's own wake-up.
  struct Registration {
    uint32_t token;
    std::shared_ptr<Handler> handler;  // shared: a handler may remove itself while it runs
  };

  EventLoop() = default;
  void run();
  void dispatch(int fd, uint32_t token, uint32_t events);
  void runTasks(std::vector<Task>& scratch);
  int millisecondsToFirstTimer();
  void runTimers();
  void wake();

  Fd epoll_;
  Fd wake_;
  std::thread thread_;
  std::mutex mutex_;                     // guards all below
  std::condition_variable handlerDone_;  // running_ has changed
  std::unordered_map<int, Registration> handlers_;
  std::vector<Task> tasks_;
  std::map<std::pair<Clock::time_point, TimerId>, Task> timers_;
  TimerId lastTimer_ = 0;
  uint32_t lastToken_ = 0;
  uint32_t running_ = 0;  // token of the handler that runs now, else 0
  bool stopping_ = false;
};

}  // namespace mooncake
