#include "base/event_loop.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <future>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/thread.h"

namespace mooncake {
namespace {

constexpr uint32_t kWakeToken = 0;

epoll_event eventFor(int fd, uint32_t token, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = uint64_t(token) << 32 | static_cast<uint32_t>(fd);
  return event;
}

}  // namespace

Result<std::unique_ptr<EventLoop>> EventLoop::start(const std::string& threadName) {
  std::unique_ptr<EventLoop> loop(new EventLoop);
  loop->epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!loop->epoll_) return systemError("epoll_create1", errno);
  loop->wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!loop->wake_) return systemError("eventfd", errno);
  epoll_event event = eventFor(loop->wake_.get(), kWakeToken, EPOLLIN);
  if (::epoll_ctl(loop->epoll_.get(), EPOLL_CTL_ADD, loop->wake_.get(), &event) != 0) {
    return systemError("epoll_ctl(add)", errno);
  }
  auto thread = startThread(threadName, [raw = loop.get()] { raw->run(); });
  if (!thread.ok()) return thread.error();
  loop->thread_ = std::move(*thread);
  return loop;
}

EventLoop::~EventLoop() { stop(); }

void EventLoop::stop() {
  if (!thread_.joinable()) return;
  {
    Lock lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_.join();
}

Status EventLoop::add(int fd, uint32_t events, Handler handler) {
  auto shared = std::make_shared<Handler>(std::move(handler));
  Lock lock(mutex_);
  if (++lastToken_ == kWakeToken) ++lastToken_;
  // Both under the lock: an event that comes at once finds its handler.
  epoll_event event = eventFor(fd, lastToken_, events);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return systemError("epoll_ctl(add, " + std::to_string(fd) + ")", errno);
  }
  handlers_.insert_or_assign(fd, Registration{lastToken_, std::move(shared)});
  return {};
}

Status EventLoop::modify(int fd, uint32_t events) {
  Lock lock(mutex_);
  const auto found = handlers_.find(fd);
  if (found == handlers_.end()) {
    return {ErrorCode::kInvalidArgument,
            "descriptor " + std::to_string(fd) + " is not in the event loop"};
  }
  epoll_event event = eventFor(fd, found->second.token, events);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) {
    return systemError("epoll_ctl(modify, " + std::to_string(fd) + ")", errno);
  }
  return {};
}

void EventLoop::remove(int fd) {
  std::shared_ptr<Handler> handler;  // destroyed after the unlock: it may own anything
  Lock lock(mutex_);
  const auto found = handlers_.find(fd);
  if (found == handlers_.end()) return;
  const uint32_t token = found->second.token;
  handler = std::move(found->second.handler);
  handlers_.erase(found);
  // Fails if the descriptor is closed; then it is out of the set already.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  if (onLoopThread()) return;
  handlerDone_.wait(mutex_, [&]() REQUIRES(mutex_) { return running_ != token; });
}

void EventLoop::post(Task task) {
  bool isFirst;
  {
    Lock lock(mutex_);
    isFirst = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  if (isFirst) wake();
}

void EventLoop::runAndWait(const Task& task) {
  if (onLoopThread()) return task();
  const auto done = std::make_shared<std::promise<void>>();
  post([done, task] {
    task();
    done->set_value();
  });
  done->get_future().wait();
}

EventLoop::TimerId EventLoop::runAt(Deadline when, Task task) {
  bool isFirst;
  TimerId timer;
  {
    Lock lock(mutex_);
    timer = ++lastTimer_;
    const auto added = timers_.emplace(std::pair(when.when(), timer), std::move(task)).first;
    isFirst = added == timers_.begin();
  }
  if (isFirst && !onLoopThread()) wake();  // the loop may sleep until a later timer
  return timer;
}

void EventLoop::cancel(TimerId timer) {
  Task task;  // destroyed after the unlock: it may own anything
  Lock lock(mutex_);
  const auto found = std::find_if(timers_.begin(), timers_.end(),
                                  [&](const auto& entry) { return entry.first.second == timer; });
  if (found == timers_.end()) return;
  task = std::move(found->second);
  timers_.erase(found);
}

// Timeout for epoll_wait; -1 without a timer.
int EventLoop::millisecondsToFirstTimer() {
  Lock lock(mutex_);
  if (timers_.empty()) return -1;
  const auto left = timers_.begin()->first.first - Clock::now();
  constexpr std::chrono::milliseconds kMost = std::chrono::hours(1);
  return int(std::clamp(std::chrono::ceil<std::chrono::milliseconds>(left),
                        std::chrono::milliseconds(0), kMost)
                 .count());
}

void EventLoop::runTimers() {
  const auto now = Clock::now();
  for (;;) {
    Task task;
    {
      Lock lock(mutex_);
      if (timers_.empty() || timers_.begin()->first.first > now) return;
      task = std::move(timers_.extract(timers_.begin()).mapped());
    }
    task();
  }
}

bool EventLoop::onLoopThread() const { return std::this_thread::get_id() == thread_.get_id(); }

void EventLoop::wake() {
  // The write fails only if the counter is full, and then the loop wakes up anyway.
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
}

void EventLoop::run() {
  std::array<epoll_event, 64> events;
  std::vector<Task> scratch;
  for (;;) {
    const int count =
        ::epoll_wait(epoll_.get(), events.data(), events.size(), millisecondsToFirstTimer());
    bool woken = false;
    for (int i = 0; i < count; ++i) {  // count is -1 for EINTR: a debugger or SIGCONT
      const auto token = static_cast<uint32_t>(events[i].data.u64 >> 32);
      if (token == kWakeToken) {
        woken = true;
      } else {
        dispatch(static_cast<int>(events[i].data.u64 & 0xffffffff), token, events[i].events);
      }
    }
    runTimers();
    if (!woken) continue;
    // First clear the wake-up, then look for its cause: a post in between wakes the loop once more.
    uint64_t wakes;
    [[maybe_unused]] const auto got = ::read(wake_.get(), &wakes, sizeof(wakes));
    runTasks(scratch);
    Lock lock(mutex_);
    if (stopping_ && tasks_.empty()) return;
  }
}

void EventLoop::dispatch(int fd, uint32_t token, uint32_t events) {
  std::shared_ptr<Handler> handler;
  {
    Lock lock(mutex_);
    const auto found = handlers_.find(fd);
    if (found == handlers_.end() || found->second.token != token)
      return;  // removed since epoll_wait
    handler = found->second.handler;
    running_ = token;
  }
  (*handler)(events);
  handler.reset();  // before remove() returns: its caller may then destroy objects that the
                    // handler refers to
  {
    Lock lock(mutex_);
    running_ = 0;
  }
  handlerDone_.notify_all();
}

void EventLoop::runTasks(std::vector<Task>& scratch) {
  {
    Lock lock(mutex_);
    scratch.swap(tasks_);
  }
  for (Task& task : scratch) {
    task();
    task = nullptr;  // frees the task's objects now, not after the last task
  }
  scratch.clear();
}

}  // namespace mooncake
