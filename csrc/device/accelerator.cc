#include "device/accelerator.h"

#include "device/stream_queues.h"

namespace mooncake {

Result<StreamQueues*> Accelerator::streamQueues(int device) {
  Lock lock(queuesMutex_);
  auto& known = queues_[device];
  if (!known) {
    auto made = StreamQueues::make(*this, device);
    if (!made.ok()) return made.error();
    known = std::move(*made);
  }
  return known.get();
}

}  // namespace mooncake
