#include "backend/collective_work.h"

#include <c10/util/Exception.h>

#include "backend/collective_queue.h"
#include "backend/completions.h"

namespace mooncake {
namespace {

std::exception_ptr exceptionOf(const Ending& ending) {
  return ending.loss ? toException(ending.loss) : toException(ending.status.error());
}

}  // namespace

std::exception_ptr CollectiveWork::exception() const {
  if (!finished() || ending_.status.ok()) return nullptr;
  if (ending_.loss) ending_.loss->noteRaised();
  return exceptionOf(ending_);
}

std::exception_ptr CollectiveWork::heldException() const {
  return finished() && !ending_.status.ok() ? exceptionOf(ending_) : nullptr;
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  await(timeout);
  if (ending_.status.ok()) return true;
  std::rethrow_exception(exception());
}

// A callback runs no queued operations here: the order of callbacks depends on their turns.
void CollectiveWork::await(std::chrono::milliseconds timeout) {
  const bool isEndless = timeout <= kNoTimeout;
  const Deadline deadline =
      isEndless ? Deadline::at(Clock::time_point::max()) : Deadline::after(timeout);
  bool isOver = true;
  if (Callbacks& callbacks = *completions()->callbacks(); callbacks.isCallerInside()) {
    isOver = callbacks.await(endMoment_, deadline);
  } else if (!finished()) {
    const Callbacks::Pause pause;
    if (isEndless) {
      queue_->help(*this);
    } else {
      isOver = queue_->await(*this, deadline);
    }
  }
  if (!isOver) {
    throwError({ErrorCode::kTimeout, describe() + " is not done after the " +
                                         std::to_string(timeout.count()) +
                                         " ms that wait() was given; it goes on"});
  }
}

CallbackOrigin CollectiveWork::origin() const {
  return queue_ ? queue_->origin(era_) : CallbackOrigin();
}

const std::shared_ptr<Completions>& CollectiveWork::completions() const {
  return queue_->completions();
}

std::string CollectiveWork::describe() const {
  return c10d::opTypeToString(opType_) + " #" + std::to_string(number_) + " on rank " +
         std::to_string(rank_);
}

std::vector<int> CollectiveWork::contributors() const {
  return finished() && ending_.view ? ending_.view->active : std::vector<int>();
}

std::vector<int> CollectiveWork::failedRanks() const {
  std::vector<int> ranks;
  for (int r = 0; finished() && ending_.view && r < size_; ++r) {
    if (!ending_.view->contains(r)) ranks.push_back(r);
  }
  return ranks;
}

std::vector<int> CollectiveWork::lostRanks() const {
  std::vector<int> ranks = failedRanks();
  if (!finished() || ending_.view == nullptr || ending_.before == nullptr) return {};
  std::erase_if(ranks, [&](int r) { return !ending_.before->contains(r); });
  return ranks;
}

uint64_t CollectiveWork::epoch() const {
  return finished() && ending_.view ? ending_.view->epoch : 0;
}

void CollectiveWork::endProfile() {
  if (!isProfileEnded_.exchange(true) && recordFunctionEndCallback_) recordFunctionEndCallback_();
}

void CollectiveWork::finish(Ending ending, Completions& completions) {
  ending_ = std::move(ending);
  endProfile();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    // Either getFuture() sees that we have finished, or we see its future.
    Lock lock(futureMutex_);
    finished_.store(true, std::memory_order_release);
    future = future_;
  }
  const auto& callbacks = completions.callbacks();
  if (!future && callbacks->isIdle()) return callbacks->stampPast(endMoment_);
  auto self = c10::intrusive_ptr<CollectiveWork>::reclaim_copy(this);
  completions.post([self, future, callbacks = callbacks] {
    callbacks->stamp(self->endMoment_);
    if (future) mark(*future, self->outputs_, self->ending_);
  });
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  throwIfError(completions()->start());
  Lock lock(futureMutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (!finished()) return future_;
  if (completions()->isIdle()) {
    mark(*future_, outputs_, ending_);
    return future_;
  }
  // The futures of operations that ended earlier may still be unmarked. Their callbacks come first.
  auto self = c10::intrusive_ptr<CollectiveWork>::reclaim_copy(this);
  completions()->post([self, future = future_] { mark(*future, self->outputs_, self->ending_); });
  return future_;
}

void CollectiveWork::mark(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs,
                          const Ending& ending) {
  if (ending.status.ok()) {
    future.markCompleted(c10::IValue(outputs));
  } else {
    future.setError(exceptionOf(ending));
  }
}

}  // namespace mooncake
