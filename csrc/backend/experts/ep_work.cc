#include "backend/experts/ep_work.h"

#include "backend/errors.h"
#include "backend/experts/ep_interrupt.h"

namespace mooncake {

bool EpTaskWork::isCompleted() const {
  if (!task_->isDone()) return false;
  return !staging_ || !task_->status().ok() || staging_->isOver();
}

void EpTaskWork::awaitOnHost() {
  EpInterrupt interrupt(buffer_->group());
  buffer_->await(*task_, [&] { interrupt.onSleep(); });
  interrupt.rethrow();
  throwIfError(task_->status());
}

void EpTaskWork::wait() {
  const bool isOrdered = staging_ && staging_->isOrdered();
  // The stream goes on after an error, too, and what the program calls next comes after that.
  if (isOrdered) staging_->block();
  if (isOrdered && !blocks_ && !task_->isDone()) return;
  awaitOnHost();
  if (!staging_) return;
  if (!isOrdered) staging_->block();
  if (blocks_) staging_->synchronize();
}

void EpTaskWork::synchronize() {
  awaitOnHost();
  if (staging_) staging_->synchronize();
}

}  // namespace mooncake
