#include "device/fake/fake_queue.h"

namespace mooncake {

FakeQueue::Ticket FakeQueue::enter() {
  std::lock_guard lock(mutex_);
  return ++last_;
}

bool FakeQueue::awaitHead(Ticket ticket, const std::atomic<bool>& isHalted) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return head_ >= ticket || isHalted; });
  return !isHalted;
}

void FakeQueue::pass(Ticket ticket) {
  std::lock_guard lock(mutex_);
  if (ticket < head_) return;
  passed_.insert(ticket);
  while (!passed_.empty() && *passed_.begin() == head_) {
    passed_.erase(passed_.begin());
    ++head_;
  }
  changed_.notify_all();
}

// The lock orders the change before a waiter's next look.
void FakeQueue::wake() {
  { std::lock_guard lock(mutex_); }
  changed_.notify_all();
}

}  // namespace mooncake
