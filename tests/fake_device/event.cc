#include "event.h"

#include <chrono>
#include <thread>

#include <c10/util/Exception.h>

#include "streams.h"

namespace fake_device {

Event::Event(c10::DeviceIndex device, bool isTimed)
    : device_(device), event_(valueOf(devices().createEvent(device))) {
  if (isTimed) reached_ = std::make_shared<std::atomic<int64_t>>(0);
}

void Event::record(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_index() == device_, "fake device: the event belongs to device ",
              int(device_), ", the stream to ", int(stream.device_index()));
  if (reached_) {
    // A task before the event: once the event has happened, the time is there.
    enqueue(stream, [reached = reached_] {
      *reached = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    });
  }
  check(event_->record(nativeStream(stream)));
  isRecorded_ = true;
}

void Event::block(const c10::Stream& stream) {
  if (isRecorded_) check(event_->block(nativeStream(stream)));
}

bool Event::hasHappened() { return !isRecorded_ || valueOf(event_->hasHappened()); }

void Event::synchronize() {
  while (!hasHappened()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

double Event::millisecondsUntil(const Event& later) const {
  return double(*later.reached_ - *reached_) / 1e6;
}

}  // namespace fake_device
