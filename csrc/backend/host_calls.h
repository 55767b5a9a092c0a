#pragma once

#include "backend/calls/collective.h"
#include "backend/collective_work.h"
#include "backend/live_group.h"

namespace mooncake {

// Does collectives of a group on host memory, one after the other. Throws.
class HostCalls {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit HostCalls(LiveGroup& group) : group_(group) {}

  // Checks the call's arguments, and does it or hands it to the queue. `call`: its timeout is set.
  WorkPtr carryOut(const Collective& call);
  // The same, by this function in place of the call's own.
  WorkPtr submit(const Collective& call, HostRun run);
  // Raises on every rank, and names the ranks that did not come in time: the first one, or all.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks);
  c10::intrusive_ptr<CollectiveWork> newWork(const Collective& call);
  // Whether no operation runs or waits for its turn.
  bool isIdle() { return group_.queue()->drain(Deadline::after(Clock::duration::zero())); }
  // See CollectiveQueue::acknowledgeLoss().
  bool acknowledgeLoss();

 private:
  LiveGroup& group_;
};

}  // namespace mooncake
