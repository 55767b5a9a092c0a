#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <c10/core/Stream.h>

#include "devices.h"

namespace fake_device {

// An event of torch's. block(), hasHappened() and synchronize() mean the last record() before them,
// and do nothing before the first one. Not thread-safe, as torch's events.
class Event {
 public:
  Event(c10::DeviceIndex device, bool isTimed);

  void record(const c10::Stream& stream);
  void block(const c10::Stream& stream);
  bool hasHappened();
  void synchronize();
  // Returns the milliseconds between two events, which are timed and have happened: torch checks.
  double millisecondsUntil(const Event& later) const;

 private:
  c10::DeviceIndex device_;
  std::unique_ptr<mooncake::DeviceEvent> event_;
  bool isRecorded_ = false;
  // Nanoseconds on the monotonic clock at which a stream reached the event. Null: not timed.
  std::shared_ptr<std::atomic<int64_t>> reached_;
};

}  // namespace fake_device
