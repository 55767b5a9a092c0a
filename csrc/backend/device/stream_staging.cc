#include "backend/device/stream_staging.h"

#include <thread>
#include <utility>

#include "backend/device/rescues.h"
#include "backend/errors.h"
#include "backend/signals.h"
#include "base/failpoint.h"

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
Status StreamStaging::fetchAgain(Group& group) { return fetchAgainOn(streams().prompt(), group); }

void StreamStaging::giveBack() {
  Lock lock(mutex_);
  if (std::exchange(isEnded_, true)) return;
  words().release(number_);
  forgetTensors();
}

void StreamStaging::abandon() {
  Lock lock(mutex_);
  if (std::exchange(isEnded_, true) || !isMarked_) return;
  const auto self = std::static_pointer_cast<StreamStaging>(shared_from_this());
  Rescues::begin({.device = stream().device(),
                  .what = "the outputs of an operation that failed",
                  .isReached = [self] { return self->copied_->query(); },
                  .copy = [self](const c10::Stream& to) { self->keepOutputs(to); },
                  .release = [self] { self->words().release(self->number_); }});
}

StreamStaging::~StreamStaging() {
  dropOnDevice([&] {
    copied_.reset();
    done_.reset();
  });
}

}  // namespace mooncake
