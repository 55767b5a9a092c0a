#include "backend/device/await_event.h"

#include <chrono>
#include <thread>

namespace mooncake {

bool awaitEvent(const c10::Event& event, Deadline deadline) {
  while (!event.query()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace mooncake
