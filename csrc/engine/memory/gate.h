#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "base/wait.h"

namespace mooncake {

// Lets any number of threads in until it is closed. close() returns when the last one has left. May
// lie in shared memory. A gate of zeros is closed, so a page that was given back to the system lets
// no thread in.
class Gate {
 public:
  bool enter() {
    if (word_.fetch_add(1, std::memory_order_acquire) & kOpen) return true;
    leave();
    return false;
  }
  void leave() {
    // Sequentially consistent: pairs with the doorbell's order.
    if (!(word_.fetch_sub(1, std::memory_order_seq_cst) & kOpen)) left_.ring();
  }
  // From now on no thread enters; threads inside stay.
  void shut() { word_.fetch_and(~kOpen, std::memory_order_seq_cst); }
  // Shuts, and waits for the threads inside. They only copy memory, so they leave by themselves.
  void close();
  // The same for threads that may stay inside longer. False: the deadline passed with a thread
  // inside; no further one enters.
  bool close(Deadline deadline);

  // Number of threads inside or just being turned away.
  uint32_t inside() const { return word_.load(std::memory_order_relaxed) & ~kOpen; }

  // Keeps its thread inside while it lives, if the gate let it in.
  class Pass {
   public:
    explicit Pass(Gate& gate) : gate_(gate.enter() ? &gate : nullptr) {}
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    ~Pass() {
      if (gate_) gate_->leave();
    }
    explicit operator bool() const { return gate_ != nullptr; }

   private:
    Gate* gate_;
  };

 private:
  static constexpr uint32_t kOpen = uint32_t(1) << 31;  // the other bits count the threads inside

  std::atomic<uint32_t> word_{kOpen};
  Doorbell left_;
};

}  // namespace mooncake
