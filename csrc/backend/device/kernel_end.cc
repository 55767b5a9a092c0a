#include "backend/device/kernel_end.h"

#include <chrono>
#include <thread>

#include "backend/errors.h"
#include "backend/signals.h"

namespace mooncake {

Status KernelEnd::statusOf(const PeerGuard& guard, uint64_t number) {
  const Status usable = guard.usable();
  return usable.ok() || guard.hasEnded(number) ? Status() : usable;
}

void KernelEnd::await(Deadline deadline) const {
  const WaitInterrupt interrupt;
  while (!isDone()) {
    throwIfError(statusOf(guard_, number_));
    if (deadline.passed()) {
      throwError({ErrorCode::kTimeout,
                  "an operation has not ended on the device in the timeout of wait()"});
    }
    std::this_thread::sleep_for(kPause);
    Interruptible::look();
    interrupt.rethrow();
  }
}

}  // namespace mooncake
