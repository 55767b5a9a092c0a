#include "backend/device/device_ranks.h"

#include <chrono>
#include <exception>
#include <stdexcept>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/device_scope.h"
#include "backend/device/keep_until_passed.h"
#include "base/log.h"
#include "device/stream_queues.h"

namespace mooncake {
namespace {

constexpr std::chrono::seconds kPushLimit(1);

}  // namespace

DeviceRanks::DeviceRanks(const at::Tensor& shown, int size)
    : ActiveRanks(shown, ones(size, true), size), isFilled_(currentOn(shown.device())) {}

void DeviceRanks::push() {
  Lock lock(mutex_);
  const uint64_t now = changes();
  if (now == pushed_) return;
  try {
    copyToDevice();
    pushed_ = now;
  } catch (const std::exception& error) {
    log(LogLevel::kError, "active_ranks", "cannot be copied to ", tensor().device().str(), ": ",
        error.what());
  }
}

void DeviceRanks::pushAfter(uint64_t active) {
  const Deadline deadline = Deadline::after(kPushLimit);
  while (!areOnly(active) && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  push();
}

// No stream of ours may wait for the caller's: other streams of its queue would wait, too.
void DeviceRanks::copyToDevice() {
  const DeviceScope device(tensor().device());
  const Deadline deadline = Deadline::after(kPushLimit);
  if (!isFilled_.await(deadline))
    throw std::runtime_error("work of the stream that made the group still runs after a second");
  const c10::Stream copies = stream(deadline);
  const c10::StreamGuard on(copies);
  tensor().narrow(0, 0, size()).copy_(onHost(), /*non_blocking=*/true);
  keepUntilPassed(tensor(), copies);
  if (!StreamMark(copies).await(deadline))
    throw std::runtime_error("the device has not copied it within a second");
}

c10::Stream DeviceRanks::stream(Deadline deadline) {
  const c10::Device device = tensor().device();
  const auto accelerator = acceleratorOf(device.type());
  if (accelerator.ok()) {
    StreamQueues& queues = *orThrow((*accelerator)->streamQueues(device.index()));
    return OwnStream::named(device, orThrow(queues.findMoving(deadline)));
  }
  if (!stream_) stream_.emplace(device);
  return stream_->stream();
}

std::shared_ptr<ActiveRanks> makeActiveRanks(const at::Tensor& shown, int size) {
  if (shown.defined() && !shown.is_cpu()) return std::make_shared<DeviceRanks>(shown, size);
  return std::make_shared<ActiveRanks>(shown, size);
}

}  // namespace mooncake
