#include "backend/device/ep_kernel_work.h"

#include <chrono>
#include <exception>
#include <thread>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/errors.h"
#include "backend/signals.h"

namespace mooncake {

EpKernelWork::~EpKernelWork() {
  c10::OptionalDeviceGuard on;
  try {
    on.reset_device(stream_.device());
  } catch (const std::exception&) {
    // The context is lost, so that no other one is made either.
  }
  done_.reset();
}

// The kernel of an operation that another one followed is enqueued already: then the event comes
// later than it could.
void EpKernelWork::receive() {
  if (done_) return;
  const c10::DeviceGuard on(stream_.device());
  kernels_->receive(sent_);
  done_.emplace(stream_.device_type());
  done_->record(stream_);
}

void EpKernelWork::join() {
  const c10::DeviceGuard on(stream_.device());
  done_.emplace(stream_.device_type());
  done_->record(stream_);
  block();
}

void EpKernelWork::block() const {
  done_->block(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
}

bool EpKernelWork::isCompleted() const {
  const PeerGuard& guard = kernels_->experts().guard();
  if (isRecorded_ || !guard.usable().ok()) return true;
  const c10::DeviceGuard on(stream_.device());
  return done_ && done_->query();
}

void EpKernelWork::throwIfFailed() const {
  const PeerGuard& guard = kernels_->experts().guard();
  const Status usable = guard.usable();
  if (!usable.ok() && !guard.hasEnded(number_)) throwError(usable.error());
}

void EpKernelWork::wait() {
  receive();
  block();
  if (isRecorded_) return;
  throwIfFailed();
  if (kernels_->blocks()) synchronize();
}

void EpKernelWork::synchronize() {
  constexpr std::chrono::microseconds kPause(50);
  receive();
  if (isRecorded_) return;
  const WaitInterrupt interrupt;
  const c10::DeviceGuard on(stream_.device());
  while (!kernels_->experts().guard().hasEnded(number_) || !done_->query()) {
    throwIfFailed();
    std::this_thread::sleep_for(kPause);
    Interruptible::look();
    interrupt.rethrow();
  }
}

}  // namespace mooncake
