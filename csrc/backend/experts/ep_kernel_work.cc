#include "backend/experts/ep_kernel_work.h"

#include "backend/device/device_scope.h"
#include "backend/errors.h"

namespace mooncake {

// The kernel of an operation that another one followed is enqueued already: then the mark comes
// later than it could.
void EpKernelWork::receive() {
  if (end_) return;
  const DeviceScope on(of_.stream.device());
  if (of_.receive) of_.receive(sent_);
  end_.emplace(of_.guard, number_, of_.stream);
}

bool EpKernelWork::isCompleted() const {
  if (of_.isRecorded || !of_.guard.usable().ok()) return true;
  return end_ && end_->isOver();
}

void EpKernelWork::wait() {
  receive();
  end_->block();
  if (of_.isRecorded) return;
  throwIfError(KernelEnd::statusOf(of_.guard, number_));
  if (of_.blocks) synchronize();
}

void EpKernelWork::synchronize() {
  receive();
  if (!of_.isRecorded) end_->await(Deadline::at(Clock::time_point::max()));
}

}  // namespace mooncake
