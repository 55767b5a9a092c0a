#include "backend/device/message_staging.h"

#include <utility>

#include "backend/arguments.h"
#include "backend/device/accelerator_of.h"
#include "backend/device/device_scope.h"
#include "backend/device/rescues.h"

namespace mooncake {

MessageStaging::MessageStaging(std::shared_ptr<GroupStreams> streams, const c10::Stream& callers,
                               std::chrono::milliseconds limit)
    : Staging(streams, streams->messages(callers), limit),
      hasWords_(streams->waitWords() != nullptr),
      mayWait_(streams->mayWait(callers)),
      copied_(std::in_place, stream().device_type()),
      done_(std::in_place, stream().device_type()) {}

MessageStaging::~MessageStaging() {
  if (place_) streams().waitWords()->giveBack(*place_);
  dropOnDevice([&]() NOT_CHECKED {  // no other thread has it any more
    copied_.reset();
    done_.reset();
    beforeWait_.reset();
  });
}

at::Tensor MessageStaging::emptyOnHost(const at::Tensor& tensor) {
  const auto place = find_ ? find_(tensor) : std::nullopt;
  if (!place) return Staging::emptyOnHost(tensor);
  device_ = place->device;
  const c10::Device on = stream().device();
  const auto giveBack = [place = *place, last = last()](void*) {
    place.pool->giveBack(place.piece, *last);
  };
  return at::from_blob(place->piece.memory.data(), tensor.sizes(), giveBack,
                       at::TensorOptions(tensor.scalar_type()).device(on), on);
}

void MessageStaging::watch(c10::intrusive_ptr<MessageWork> work) {
  Lock lock(mutex_);
  work_ = std::move(work);
}

void MessageStaging::mark() {
  markReached();
  if (hasOutputs()) return;
  const DeviceScope on(stream().device());
  reached().block(stream());
  copyIn(stream());
  copied_->record(stream());
}

Result<bool> MessageStaging::hasData() const {
  try {
    const DeviceScope on(stream().device());
    return copied_->query();
  } catch (const std::exception& error) {  // of torch: the context is lost
    return {ErrorCode::kSystem,
            "the data could not be copied from " + stream().device().str() + ": " + error.what()};
  }
}

Status MessageStaging::fetch(Group& group) {
  return awaitOnHost(group, [&] { return copied_->query(); });
}

void MessageStaging::giveBack() {
  Lock lock(mutex_);
  if (isEnded_) return;
  // The host has cleared a copy of its own. Else a peer that is lost quietly leaves that to us.
  const bool clears = device_.owner && hasOutputs() && work_ && !work_->isSuccess();
  if (hasOutputs() && !isEnqueued_) {
    const DeviceScope on(stream().device());
    reached().block(stream());
    if (clears) clearOutputs(stream());
    copyOut();
    done_->record(stream());
    isEnqueued_ = true;
  } else if (clears) {
    rescue(true);
  }
  isEnded_ = true;  // not if torch has thrown: a later call copies again
  if (isRescued_) return;
  if (place_) WaitWords::release(*place_);
  forgetTensors();
}

void MessageStaging::abandon() {
  Lock lock(mutex_);
  if (std::exchange(isEnded_, true) || !place_) return;
  if (isEnqueued_) return rescue(false);
  WaitWords::release(*place_);
}

void MessageStaging::rescue(bool clears) {
  isRescued_ = true;
  const auto self = std::static_pointer_cast<MessageStaging>(shared_from_this());
  Rescues::begin({.device = stream().device(),
                  .what = "the tensors of a receive that failed",
                  // Without the lock: once the copy is enqueued, the event stays as it is.
                  .isReached = [self]() NOT_CHECKED { return self->beforeWait_->query(); },
                  .copy =
                      [self, clears](const c10::Stream& to) {
                        clears ? self->clearOutputs(to) : self->keepOutputs(to);
                      },
                  .release = [place = *place_] { WaitWords::release(place); }});
}

void MessageStaging::settle() {
  c10::intrusive_ptr<MessageWork> work;
  {
    Lock lock(mutex_);
    if (isEnded_ || !work_ || !work_->finished()) return;
    work = work_;
  }
  work->takeOverQuietly();
  if (!work->hasResult()) return abandon();
  giveBack();
}

void MessageStaging::release() {
  Lock lock(mutex_);
  if (place_ && !isRescued_) WaitWords::release(*place_);
}

bool MessageStaging::isOver() const {
  if (!hasOutputs()) return true;
  Lock lock(mutex_);
  return isEnqueued_ && done_->query();
}

void MessageStaging::block() {
  Lock lock(mutex_);
  if (!hasOutputs()) return copied_->block(callersStream());
  if (!isEnqueued_ && !isEnded_ && work_ && mayWait_) return blockEarly();
  if (isEnqueued_) done_->block(callersStream());
}

void MessageStaging::blockEarly() {
  const c10::Stream callers = callersStream();
  refuseCapture(callers, "a wait for a message cannot be recorded");
  const DeviceStream native = orThrow(nativeStream(callers));
  WaitWords& words = *streams().waitWords();
  if (!place_) place_ = orThrow(words.take());
  reached().block(callers);
  beforeWait_.emplace(callers.device_type()).record(callers);
  throwIfError(words.await(native, *place_));
  copyOut(callers);
  done_->record(callers);
  useLast(native);
  isEnqueued_ = true;
}

void MessageStaging::synchronize() const {
  Lock lock(mutex_);
  if (isEnqueued_) done_->synchronize();
}

}  // namespace mooncake
