#include "engine/memory/gate.h"

#include <chrono>

namespace mooncake {

void Gate::close() {
  word_.fetch_and(~kOpen, std::memory_order_seq_cst);
  const Interrupt never;
  const auto empty = [&] { return (word_.load(std::memory_order_acquire) & ~kOpen) == 0; };
  const auto wait = [&] {
    return Waiter{left_, never, 0, Deadline::after(std::chrono::seconds(10)), SpinPolicy{}}.until(
        empty);
  };
  // Whoever is inside copies memory and nothing else: it leaves by itself.
  while (wait() != WaitResult::kReady) {
  }
}

}  // namespace mooncake
