#pragma once

#include <atomic>

#include "base/wait.h"

namespace mooncake::transfer {

// How many transfers of one engine may be under way at a time. Any thread.
class Limiter {
 public:
  explicit Limiter(size_t most) : free_(static_cast<int64_t>(most)) {}

  bool tryTake() {
    if (free_.fetch_sub(1, std::memory_order_acquire) > 0) return true;
    give();
    return false;
  }
  void give() {
    free_.fetch_add(1, std::memory_order_seq_cst);
    given_.ring();
  }
  // Until there may be one, somebody bumps the interrupt and calls wake(), or the deadline.
  void await(const Interrupt& interrupt, uint32_t generation, Deadline deadline) {
    const Waiter waiter{given_, interrupt, generation, deadline, SpinPolicy::forMessages()};
    (void)waiter.until([this] { return free_.load(std::memory_order_acquire) > 0; });
  }
  void wake() { given_.ring(); }

 private:
  std::atomic<int64_t> free_;
  Doorbell given_;
};

}  // namespace mooncake::transfer
