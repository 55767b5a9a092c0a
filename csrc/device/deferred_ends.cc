#include "device/deferred_ends.h"

#include <utility>

#include "base/log.h"

namespace mooncake {

void DeferredEnds::add(Accelerator& accelerator, std::vector<DeviceStream> streams,
                       std::function<void()> end) {
  One one{.accelerator = &accelerator,
          .streams = std::move(streams),
          .events = {},
          .end = std::move(end)};
  record(one);
  Lock lock(mutex_);
  ones_.push_back(std::move(one));
}

void DeferredEnds::runDue() {
  std::list<One> due, lost;
  {
    Lock lock(mutex_);
    for (auto at = ones_.begin(); at != ones_.end();) {
      const auto one = at++;
      const auto passed = hasPassed(*one);
      if (!passed.ok()) {
        log(LogLevel::kWarning, "device", "memory stays, as it cannot be known when streams have ",
            "passed: ", passed.error().message);
        lost.splice(lost.end(), ones_, one);
      } else if (*passed) {
        due.splice(due.end(), ones_, one);
      }
    }
  }
  for (const One& one : due) one.end();
}

size_t DeferredEnds::waiting() const {
  Lock lock(mutex_);
  return ones_.size();
}

Result<bool> DeferredEnds::hasPassed(One& one) {
  record(one);
  while (!one.events.empty()) {
    const auto happened = one.events.back()->hasHappened();
    if (!happened.ok()) return happened.error();
    if (!*happened) return false;
    one.events.pop_back();
  }
  return one.streams.empty();
}

// An event on a stream that is captured would belong to the graph. After an error of the driver the
// stream stays for a later call, too: a capture may be the cause.
void DeferredEnds::record(One& one) {
  std::erase_if(one.streams, [&](DeviceStream stream) {
    const auto isCaptured = one.accelerator->isCapturing(stream);
    if (!isCaptured.ok() || *isCaptured) return false;
    auto event = one.accelerator->createEvent(stream.device);
    if (!event.ok() || !(*event)->record(stream).ok()) return false;
    one.events.push_back(std::move(*event));
    return true;
  });
}

}  // namespace mooncake
