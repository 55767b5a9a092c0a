#include "backend/device/stream_mark.h"

#include <chrono>
#include <exception>
#include <thread>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/device/device_scope.h"

namespace mooncake {

StreamMark::StreamMark(const c10::Stream& stream) : device_(stream.device()) {
  event_.emplace(stream.device_type());
  event_->record(stream);
}

StreamMark::~StreamMark() {
  c10::OptionalDeviceGuard on;
  try {
    on.reset_device(device_);
  } catch (const std::exception&) {
    // The context is lost, so that no other one is made either.
  }
  event_.reset();
}

bool StreamMark::isReached() const {
  const DeviceScope on(device_);
  return event_->query();
}

void StreamMark::block() const { event_->block(currentOn(device_)); }

bool StreamMark::await(Deadline deadline) const {
  while (!isReached()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

c10::Stream currentOn(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void placeBehind(const c10::Stream& stream, const c10::Stream& other) {
  c10::Event reached(other.device_type());
  reached.record(other);
  reached.block(stream);
}

}  // namespace mooncake
