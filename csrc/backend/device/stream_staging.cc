#include "backend/device/stream_staging.h"

#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>

#include "backend/errors.h"
#include "base/log.h"

namespace mooncake {
namespace {

constexpr auto kRescueLimit = std::chrono::seconds(1);

bool awaitEvent(const c10::Event& event, Deadline deadline) {
  while (!event.query()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace

void StreamStaging::mark() {
  markReached();
  number_ = nextNumber();
  isMarked_ = true;
  reached().block(stream());
  copyIn(stream());
  copied_.record(stream());
  throwIfError(words_->tell(number_));
  throwIfError(words_->await(number_));
  copyOut();
  done_.record(stream());
}

// Waits on the host while too many operations are under way.
uint32_t StreamStaging::nextNumber() const {
  const Deadline deadline = Deadline::after(limit());
  for (;;) {
    if (const auto number = words_->next()) return *number;
    if (deadline.passed()) {
      throwError({ErrorCode::kExhausted, "too many operations are under way on a stream of " +
                                             stream().device().str() +
                                             ", and none has ended in the group's timeout"});
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

Status StreamStaging::fetch(Group& group) {
  return awaitOnHost(group, [&] { return words_->isTold(number_); });
}

void StreamStaging::giveBack() {
  std::lock_guard lock(mutex_);
  if (std::exchange(isEnded_, true)) return;
  words_->release(number_);
  forgetTensors();
}

void StreamStaging::abandon() {
  std::lock_guard lock(mutex_);
  if (std::exchange(isEnded_, true) || !isMarked_) return;
  if (!fetchOutputs()) {
    log(LogLevel::kWarning, stream().device().str(),
        "the outputs of an operation that failed are undefined: earlier work on the caller's "
        "stream still runs, or the device failed");
  }
  words_->release(number_);
}

bool StreamStaging::fetchOutputs() const try {
  const c10::DeviceGuard on(stream().device());
  const Deadline deadline = Deadline::after(kRescueLimit);
  // The host waits for this, and no stream: other operations may use the stream below.
  if (!awaitEvent(copied_, deadline)) return false;
  const c10::Stream beside = anotherStream();
  keepOutputs(beside);
  c10::Event fetched(beside.device_type());
  fetched.record(beside);
  return awaitEvent(fetched, deadline);
} catch (const std::exception&) {  // of torch: the device's context is lost, for example
  return false;
}

}  // namespace mooncake
