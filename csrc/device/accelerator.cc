#include "device/accelerator.h"

#include "device/stream_queues.h"

namespace mooncake {

Result<StreamQueues*> Accelerator::streamQueues(int device) {
  std::lock_guard lock(queuesMutex_);
  auto& known = queues_[device];
  if (!known) {
    auto made = StreamQueues::make(*this, device);
    if (!made.ok()) return made.error();
    known = std::move(*made);
  }
  return known.get();
}

Result<DeviceStream> Accelerator::takePromptStream(int device) {
  const auto queues = streamQueues(device);
  return queues.ok() ? (*queues)->take(StreamRole::kPrompt) : queues.error();
}

void Accelerator::giveBackStream(DeviceStream stream) {
  const auto queues = streamQueues(stream.device);
  if (queues.ok()) (*queues)->giveBack(stream);
}

}  // namespace mooncake
