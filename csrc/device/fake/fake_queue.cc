#include "device/fake/fake_queue.h"

namespace mooncake {

FakeQueue::Ticket FakeQueue::enter() {
  Lock lock(mutex_);
  return ++last_;
}

bool FakeQueue::awaitHead(Ticket ticket, const std::atomic<bool>& isHalted) {
  Lock lock(mutex_);
  changed_.wait(mutex_, [&]() REQUIRES(mutex_) { return head_ >= ticket || isHalted; });
  return !isHalted;
}

void FakeQueue::pass(Ticket ticket) {
  Lock lock(mutex_);
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
  { Lock lock(mutex_); }
  changed_.notify_all();
}

}  // namespace mooncake
