#include "backend/device/ep_kernel_work.h"

#include <chrono>
#include <exception>
#include <thread>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/device/device_scope.h"
#include "backend/errors.h"
#include "backend/signals.h"

namespace mooncake {

EpKernelWork::~EpKernelWork() {
  c10::OptionalDeviceGuard on;
  try {
    on.reset_device(of_.stream.device());
  } catch (const std::exception&) {
    // The context is lost, so that no other one is made either.
  }
  done_.reset();
}

// The kernel of an operation that another one followed is enqueued already: then the event comes
// later than it could.
void EpKernelWork::receive() {
  if (done_) return;
  const DeviceScope on(of_.stream.device());
  if (of_.receive) of_.receive(sent_);
  done_.emplace(of_.stream.device_type());
  done_->record(of_.stream);
}

void EpKernelWork::join() {
  const DeviceScope on(of_.stream.device());
  done_.emplace(of_.stream.device_type());
  done_->record(of_.stream);
  block();
}

void EpKernelWork::block() const {
  done_->block(
      c10::impl::VirtualGuardImpl(of_.stream.device_type()).getStream(of_.stream.device()));
}

bool EpKernelWork::isCompleted() const {
  const PeerGuard& guard = of_.guard;
  if (of_.isRecorded || !guard.usable().ok()) return true;
  const DeviceScope on(of_.stream.device());
  return done_ && done_->query();
}

void EpKernelWork::throwIfFailed() const {
  const PeerGuard& guard = of_.guard;
  const Status usable = guard.usable();
  if (!usable.ok() && !guard.hasEnded(number_)) throwError(usable.error());
}

void EpKernelWork::wait() {
  receive();
  block();
  if (of_.isRecorded) return;
  throwIfFailed();
  if (of_.blocks) synchronize();
}

void EpKernelWork::synchronize() {
  constexpr std::chrono::microseconds kPause(50);
  receive();
  if (of_.isRecorded) return;
  const WaitInterrupt interrupt;
  const DeviceScope on(of_.stream.device());
  while (!of_.guard.hasEnded(number_) || !done_->query()) {
    throwIfFailed();
    std::this_thread::sleep_for(kPause);
    Interruptible::look();
    interrupt.rethrow();
  }
}

}  // namespace mooncake
