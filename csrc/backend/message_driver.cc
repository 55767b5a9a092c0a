#include "backend/message_driver.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/thread.h"

namespace mooncake {
namespace {

// How often the thread looks while a waiting caller drives the messages.
constexpr auto kLookBesideWaiter = std::chrono::milliseconds(10);
// How long the thread sleeps at the doorbell before it looks for deadlines and for stop().
constexpr auto kLookAlone = std::chrono::milliseconds(50);
// Longest time between two looks at a send whose data is not there yet.
constexpr auto kLookForData = std::chrono::microseconds(200);
// A blocking receive is over before this. Only messages that last longer are worth the thread.
constexpr auto kGrace = std::chrono::milliseconds(1);
// A caller that waits for a message that was just ended needs a turn on a core, and perhaps time
// for a copy.
constexpr auto kToGetOut = std::chrono::seconds(10);

}  // namespace

MessageDriver::MessageDriver(Group& group, std::shared_ptr<Completions> completions,
                             bool lostMessagesReturn)
    : completions_(std::move(completions)),
      lostMessagesReturn_(lostMessagesReturn),
      messages_(group, lostMessagesReturn) {}

Error MessageDriver::destroyed() { return {ErrorCode::kAborted, "the group was destroyed"}; }

bool MessageDriver::stop(const Error& why) {
  bool isFirst;
  {
    Lock lock(mutex_);
    isFirst = !std::exchange(stopping_, true);
    changed_.notify_all();
  }
  if (isFirst) {  // the second time the group may be gone
    if (thread_.joinable()) thread_.join();
    messages_.abort(why);
    Lock lock(mutex_);
    notifyFinished();
  }
  return messages_.close(Deadline::after(kToGetOut));
}

Status MessageDriver::watch() {
  Lock lock(mutex_);
  if (stopping_ || pending_) return {};
  if (!thread_.joinable()) {
    auto thread = startThread("mooncake-msg", [this] { run(); });
    if (!thread.ok()) return thread.error();
    thread_ = std::move(*thread);
  }
  pending_ = true;
  changed_.notify_all();
  return {};
}

void MessageDriver::whenFinished(std::shared_ptr<Message> message, std::function<void()> task) {
  {
    Lock lock(mutex_);
    waiting_.emplace_back(message, std::move(task));
    notifyFinished();
  }
  const Status watched = watch();
  if (watched.ok()) return;
  messages_.cancel(*message, watched.error());
  Lock lock(mutex_);
  notifyFinished();
}

void MessageDriver::settleWhenFinished(std::shared_ptr<Message> message,
                                       std::function<void()> task) {
  if (message->finished()) return settle(std::move(task));
  {
    Lock lock(mutex_);
    settling_.emplace_back(message, std::move(task));
  }
  const Status watched = watch();
  messages_.ring();  // the thread may sleep there for an earlier message
  if (watched.ok()) return;
  messages_.cancel(*message, watched.error());
  Lock lock(mutex_);
  notifyFinished();
}

void MessageDriver::settle(std::function<void()> task) {
  task();
  completions_->post([task = std::move(task)] {});
}

MessageDriver::Tasks MessageDriver::takeFinished(Tasks& tasks) {
  const auto finished = std::stable_partition(tasks.begin(), tasks.end(),
                                              [](const auto& t) { return !t.first->finished(); });
  Tasks taken(std::make_move_iterator(finished), std::make_move_iterator(tasks.end()));
  tasks.erase(finished, tasks.end());
  return taken;
}

// Gives the lock away while tasks run.
void MessageDriver::notifyFinished() {
  Tasks settled = takeFinished(settling_);
  Tasks notified = takeFinished(waiting_);
  const UnlockedScope unlocked(mutex_);
  for (auto& [message, task] : settled) settle(std::move(task));
  for (auto& [message, task] : notified) completions_->post(std::move(task));
}

bool MessageDriver::isSomeFinished() {
  Lock lock(mutex_);
  return std::ranges::any_of(settling_, [](const auto& t) { return t.first->finished(); });
}

// Sleeps at the doorbell until there is news. Returns whether nothing is under way.
bool MessageDriver::look() {
  bool isIdle = messages_.progress();
  const bool awaitsData = messages_.awaitsData();
  Waiter waiter = messages_.waiter(Deadline::after(awaitsData ? kLookForData : kLookAlone));
  waiter.spin = {.pauses = 0, .yields = 0};
  waiter.until([&] {
    isIdle = messages_.progress();
    return isIdle || messages_.awaitsData() != awaitsData || isSomeFinished();
  });
  return messages_.progress();
}

void MessageDriver::run() {
  const auto isDue = [&]() REQUIRES(mutex_) { return stopping_ || isUrgent(); };
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(mutex_, [&]() REQUIRES(mutex_) { return stopping_ || pending_; });
    // Stays awake for a while after the last message, so that a series of them does not wake it one
    // by one.
    changed_.wait_for(mutex_, kGrace, isDue);
    while (!stopping_ && pending_) {
      pending_ = false;  // a message that is posted meanwhile sets it again
      const bool looks = isUrgent() || messages_.drivers() == 0;
      lock.unlock();
      const bool isIdle = looks && look();
      lock.lock();
      notifyFinished();
      if (looks) {
        pending_ = pending_ || !isIdle || !waiting_.empty() || !settling_.empty();
      } else {
        pending_ = true;
        changed_.wait_for(mutex_, kLookBesideWaiter, isDue);
      }
    }
    if (stopping_) return;
  }
}

}  // namespace mooncake
