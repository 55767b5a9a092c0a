#include "engine/memory/gate.h"

#include <chrono>

namespace mooncake {

void Gate::close() {
  while (!close(Deadline::after(std::chrono::seconds(10)))) {
  }
}

bool Gate::close(Deadline deadline) {
  shut();
  const Interrupt never;
  const auto empty = [&] { return (word_.load(std::memory_order_acquire) & ~kOpen) == 0; };
  return Waiter{left_, never, 0, deadline, SpinPolicy{}}.until(empty) == WaitResult::kReady;
}

}  // namespace mooncake
