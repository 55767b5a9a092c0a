#include "backend/device/stream_staging.h"

#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>

#include "backend/errors.h"
#include "backend/signals.h"
#include "base/failpoint.h"
#include "base/log.h"

namespace mooncake {

void StreamStaging::mark() {
  markReached();
  enqueue([&] {
    number_ = nextNumber(words(), stream(), limit());
    try {
      enqueueAll();
    } catch (...) {
      words().release(number_);  // the stream may wait already
      throw;
    }
  });
  isMarked_ = true;
}

void StreamStaging::enqueueAll() {
  failpoint("stage-marked");
  reached().block(stream());
  copyIn(stream());
  copied_->record(stream());
  failpoint("stage-copies-in");
  throwIfError(words().tell(number_));
  throwIfError(words().await(number_));
  failpoint("stage-words");
  copyOut();
  done_->record(stream());
}

uint32_t StreamStaging::nextNumber(StreamWords& words, const c10::Stream& stream,
                                   std::chrono::milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  const WaitInterrupt interrupt;
  for (;;) {
    if (const auto number = words.next()) return *number;
    Interruptible::look();
    interrupt.rethrow();
    if (deadline.passed()) {
      throwError({ErrorCode::kExhausted, "too many operations are under way on a stream of " +
                                             stream.device().str() +
                                             ", and none has ended in the group's timeout"});
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

Status StreamStaging::fetch(Group& group) {
  if (comesInPieces()) return awaitInput(group, 1);
  return awaitOnHost(group, [&] { return words().isTold(number_); });
}

// Our stream waits for the results.
Status StreamStaging::fetchAgain(Group& group) {
  const c10::DeviceGuard on(stream().device());
  const OwnStream other(stream().device());
  return fetchAgainOn(other.stream(), group);
}

void StreamStaging::giveBack() {
  std::lock_guard lock(mutex_);
  if (std::exchange(isEnded_, true)) return;
  words().release(number_);
  forgetTensors();
}

void StreamStaging::abandon() {
  std::lock_guard lock(mutex_);
  if (std::exchange(isEnded_, true) || !isMarked_) return;
  try {
    enqueueRescue();
    return;
  } catch (const std::exception& error) {  // of torch, or the driver's: a lost context, for example
    log(LogLevel::kWarning, stream().device().str(),
        "the outputs of an operation that failed are undefined: ", error.what());
  }
  words().release(number_);
}

// Not a stream that several operations share: the rescue of a later one may come first, and waits
// until this one is over.
void StreamStaging::enqueueRescue() {
  const c10::DeviceGuard on(stream().device());
  const c10::Stream& rescue = rescue_.emplace(stream().device()).stream();
  copied_->block(rescue);
  keepOutputs(rescue);
  throwIfError(words().releaseFrom(rescue_->native(), number_));
}

StreamStaging::~StreamStaging() {
  dropOnDevice([&] {
    copied_.reset();
    done_.reset();
  });
}

}  // namespace mooncake
