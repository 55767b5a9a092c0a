#include "backend/collective_work.h"

#include <c10/util/Exception.h>

#include "backend/collective_queue.h"
#include "backend/completions.h"
#include "backend/errors.h"

namespace mooncake {

std::exception_ptr CollectiveWork::exception() const {
  return finished() && !status_.ok() ? toException(status_.error()) : nullptr;
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (!finished()) {
    if (timeout <= kNoTimeout) {
      queue_->help(*this);
    } else if (!queue_->await(*this, Deadline::after(timeout))) {
      throwError({ErrorCode::kTimeout,
                  c10d::opTypeToString(opType_) + " #" + std::to_string(number_) + " on rank " +
                      std::to_string(rank_) + " is not done after the " +
                      std::to_string(timeout.count()) + " ms that wait() was given; it goes on"});
    }
  }
  throwIfError(status_);
  return true;
}

void CollectiveWork::finish(Status status, Completions& completions) {
  status_ = std::move(status);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    // Either getFuture() sees that we have finished, or we see its future.
    std::lock_guard lock(futureMutex_);
    finished_.store(true, std::memory_order_release);
    future = future_;
  }
  if (future)
    completions.post(
        [future, outputs = outputs_, status = status_] { mark(*future, outputs, status); });
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  std::lock_guard lock(futureMutex_);
  if (!future_) {
    future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (finished()) mark(*future_, outputs_, status_);
  }
  return future_;
}

void CollectiveWork::mark(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs,
                          const Status& status) {
  if (status.ok()) {
    future.markCompleted(c10::IValue(outputs));
  } else {
    future.setError(toException(status.error()));
  }
}

}  // namespace mooncake
