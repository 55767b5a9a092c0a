#include "backend/message_driver.h"

#include <algorithm>
#include <utility>

#include "base/thread.h"

namespace mooncake {
namespace {

// How often the thread looks while a waiting caller drives the messages.
constexpr auto kLookBesideWaiter = std::chrono::milliseconds(10);
// How long the thread sleeps at the doorbell before it looks for deadlines and for stop().
constexpr auto kLookAlone = std::chrono::milliseconds(50);
// A blocking receive is over before this. Only messages that last longer are worth the thread.
constexpr auto kGrace = std::chrono::milliseconds(1);
// A caller that waits for a message that was just ended needs a turn on a core, and perhaps time
// for a copy.
constexpr auto kToGetOut = std::chrono::seconds(10);

}  // namespace

MessageDriver::MessageDriver(Group& group, std::shared_ptr<Completions> completions,
                             bool lostMessagesReturn)
    : group_(group),
      completions_(std::move(completions)),
      lostMessagesReturn_(lostMessagesReturn),
      messages_(group) {}

bool MessageDriver::stop() {
  bool isFirst;
  {
    std::lock_guard lock(mutex_);
    isFirst = !std::exchange(stopping_, true);
    changed_.notify_all();
  }
  if (isFirst) {  // the second time the group may be gone
    if (thread_.joinable()) thread_.join();
    messages_.abort({ErrorCode::kAborted, "the group was destroyed"});
    std::lock_guard lock(mutex_);
    notifyFinished();
  }
  return messages_.close(Deadline::after(kToGetOut));
}

Status MessageDriver::watch() {
  std::lock_guard lock(mutex_);
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
    std::lock_guard lock(mutex_);
    waiting_.emplace_back(message, std::move(task));
    notifyFinished();
  }
  const Status watched = watch();
  if (watched.ok()) return;
  messages_.cancel(*message, watched.error());
  std::lock_guard lock(mutex_);
  notifyFinished();
}

// With the lock.
void MessageDriver::notifyFinished() {
  const auto finished = std::stable_partition(waiting_.begin(), waiting_.end(),
                                              [](const auto& w) { return !w.first->finished(); });
  for (auto it = finished; it != waiting_.end(); ++it) completions_->post(std::move(it->second));
  waiting_.erase(finished, waiting_.end());
}

void MessageDriver::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || pending_; });
    // Stays awake for a while after the last message, so that a series of them does not wake it one
    // by one.
    changed_.wait_for(lock, kGrace, [&] { return stopping_; });
    while (!stopping_ && pending_) {
      pending_ = false;  // a message that is posted meanwhile sets it again
      lock.unlock();
      bool idle = false;
      const bool alone = messages_.drivers() == 0;
      if (alone) {
        Waiter waiter = group_.waiter(Deadline::after(kLookAlone));
        waiter.spin = {.pauses = 0, .yields = 0};
        waiter.until([&] { return (idle = messages_.progress()); });
        idle = messages_.progress();
      }
      lock.lock();
      notifyFinished();
      if (alone) {
        pending_ = pending_ || !idle || !waiting_.empty();
      } else {
        pending_ = true;
        changed_.wait_for(lock, kLookBesideWaiter, [&] { return stopping_; });
      }
    }
    if (stopping_) return;
  }
}

}  // namespace mooncake
