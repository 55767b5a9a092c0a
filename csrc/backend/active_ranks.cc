#include "backend/active_ranks.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/await_event.h"
#include "backend/device/device_scope.h"
#include "backend/device/keep_until_passed.h"
#include "base/log.h"
#include "device/stream_queues.h"

namespace mooncake {
namespace {

constexpr std::chrono::seconds kPushLimit(1);

at::Tensor ones(int size, bool isPinned) {
  return at::ones({size}, at::TensorOptions(at::kInt).device(at::kCPU).pinned_memory(isPinned));
}

}  // namespace

ActiveRanks::ActiveRanks(at::Tensor shown, int size)
    : size_(size),
      shown_(shown.defined() ? std::move(shown) : ones(size, false)),
      host_(shown_.is_cpu() ? shown_ : ones(size, true)) {
  if (shown_.is_cpu()) return;
  isFilled_.emplace(shown_.device().type());
  isFilled_->record(c10::impl::VirtualGuardImpl(shown_.device().type()).getStream(shown_.device()));
}

ActiveRanks::~ActiveRanks() {
  if (!isFilled_) return;
  c10::OptionalDeviceGuard on;
  try {
    on.reset_device(shown_.device());
  } catch (const std::exception&) {
    // The context is lost, so that no other one is made either.
  }
  isFilled_.reset();
}

void ActiveRanks::show(const GroupView& view) {
  int32_t* const elements = host_.mutable_data_ptr<int32_t>();
  for (int r = 0; r < size_; ++r) {
    std::atomic_ref<int32_t>(elements[r]).store(view.contains(r), std::memory_order_release);
  }
  changes_.fetch_add(1, std::memory_order_release);
}

void ActiveRanks::push() {
  if (shown_.is_cpu()) return;
  std::lock_guard lock(mutex_);
  const uint64_t changes = changes_.load(std::memory_order_acquire);
  if (changes == pushed_) return;
  try {
    copyToDevice();
    pushed_ = changes;
  } catch (const std::exception& error) {
    log(LogLevel::kError, "active_ranks", "cannot be copied to ", shown_.device().str(), ": ",
        error.what());
  }
}

void ActiveRanks::pushAfter(uint64_t active) {
  if (shown_.is_cpu()) return;
  int32_t* const elements = host_.mutable_data_ptr<int32_t>();
  const auto isShown = [&] {
    for (int r = 0; r < size_; ++r) {
      const auto shown = std::atomic_ref<int32_t>(elements[r]).load(std::memory_order_acquire);
      if (shown != 0 && (active >> r & 1) == 0) return false;
    }
    return true;
  };
  const Deadline deadline = Deadline::after(kPushLimit);
  while (!isShown() && !deadline.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  push();
}

// No stream of ours may wait for the caller's: other streams of its queue would wait, too.
void ActiveRanks::copyToDevice() {
  const DeviceScope device(shown_.device());
  const Deadline deadline = Deadline::after(kPushLimit);
  if (!awaitEvent(*isFilled_, deadline))
    throw std::runtime_error("work of the stream that made the group still runs after a second");
  const c10::Stream copies = stream(deadline);
  const c10::StreamGuard on(copies);
  shown_.narrow(0, 0, size_).copy_(host_, /*non_blocking=*/true);
  keepUntilPassed(shown_, copies);
  c10::Event copied(shown_.device().type());
  copied.record(copies);
  if (!awaitEvent(copied, deadline))
    throw std::runtime_error("the device has not copied it within a second");
}

c10::Stream ActiveRanks::stream(Deadline deadline) {
  const c10::Device device = shown_.device();
  const auto accelerator = acceleratorOf(device.type());
  if (accelerator.ok()) {
    StreamQueues& queues = *orThrow((*accelerator)->streamQueues(device.index()));
    return OwnStream::named(device, orThrow(queues.findMoving(deadline)));
  }
  if (!stream_) stream_.emplace(device);
  return stream_->stream();
}

}  // namespace mooncake
