#include "backend/device/stream_staging.h"

#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>

#include "backend/device/await_event.h"
#include "backend/errors.h"
#include "base/failpoint.h"
#include "base/log.h"

namespace mooncake {
namespace {

constexpr auto kRescueLimit = std::chrono::seconds(1);

}  // namespace

void StreamStaging::mark() {
  markReached();
  number_ = nextNumber();
  isMarked_ = true;
  failpoint("stage-marked");
  reached().block(stream());
  copyIn(stream());
  copied_.record(stream());
  failpoint("stage-copies-in");
  throwIfError(words().tell(number_));
  throwIfError(words().await(number_));
  failpoint("stage-words");
  copyOut();
  done_.record(stream());
}

// Waits on the host while too many operations are under way.
uint32_t StreamStaging::nextNumber() const {
  const Deadline deadline = Deadline::after(limit());
  for (;;) {
    if (const auto number = words().next()) return *number;
    if (deadline.passed()) {
      throwError({ErrorCode::kExhausted, "too many operations are under way on a stream of " +
                                             stream().device().str() +
                                             ", and none has ended in the group's timeout"});
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

Status StreamStaging::fetch(Group& group) {
  return awaitOnHost(group, [&] { return words().isTold(number_); });
}

void StreamStaging::giveBack() {
  std::lock_guard lock(mutex_);
  if (!std::exchange(isEnded_, true)) words().release(number_);
}

void StreamStaging::abandon() {
  std::lock_guard lock(mutex_);
  if (std::exchange(isEnded_, true) || !isMarked_) return;
  if (!fetchOutputs()) {
    log(LogLevel::kWarning, stream().device().str(),
        "the outputs of an operation that failed are undefined: earlier work on the caller's "
        "stream still runs, or the device failed");
  }
  words().release(number_);
}

bool StreamStaging::fetchOutputs() const try {
  const c10::DeviceGuard on(stream().device());
  const bool wasStuck = streams().isStuck();
  const auto limit = wasStuck ? std::chrono::seconds(0) : kRescueLimit;
  const Deadline deadline = Deadline::after(limit);
  // The host waits for this, and no stream: `rescue` serves all operations of the group.
  if (!awaitEvent(copied_, deadline)) {
    streams().isStuck() = true;
    return false;
  }
  const c10::Stream& rescue = streams().rescue();
  keepOutputs(rescue);
  c10::Event fetched(rescue.device_type());
  fetched.record(rescue);
  const bool isFetched = awaitEvent(fetched, Deadline::after(kRescueLimit));
  if (!isFetched) leak();
  return isFetched;
} catch (const std::exception&) {  // of torch: the device's context is lost, for example
  return false;
}

}  // namespace mooncake
