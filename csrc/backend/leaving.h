#pragma once

#include <atomic>

#include "backend/live_group.h"
#include "base/mutex.h"

namespace mooncake {

class DeviceHalf;

// How a group ends on this rank. A forked child leaves everything as it is: the threads are the
// parent's.
class Leaving {
 public:
  // The job's other groups have this one leave with them until close().
  Leaving(LiveGroup& group, DeviceHalf& devices);
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;

  // Leaves in good order. Waits until all calls have ended, here and on ranks that need our memory
  // for them, at most for failure_timeout. Every later call is refused. The head of the job also
  // leaves all other groups of the job, even if the caller still holds them, and
  // says goodbye to the peers. Its ranks other than 0 first wait a moment until rank 0 has gone.
  void shutdown();
  // Whether leaveGroup() was called, by one of the functions here or by the job.
  bool hasLeft() const { return hasLeft_; }
  // Makes this group the head of the job, if the other one is.
  void takeOver(const Leaving& other);
  // Leaves the group and gives everything back: joins the threads; the engine goes with its last
  // group. Waits for the completion thread, which may wait for Python's lock: do not hold that
  // lock. Nothing may be called afterwards.
  void close();
  // Leaves this group only: the first half of shutdown(), and for each group when the process ends.
  // Returns false if the group was not usable any more. With kFailed it waits for no other rank.
  bool leaveGroup(Farewell::How how = Farewell::How::kDestroyed);
  // At the end of the process: leaves all groups that share the engine, and says goodbye to the
  // peers. Nothing is received afterwards. Waits for the completion thread, at most for
  // failure_timeout.
  void leaveJob(const Farewell& farewell);

 private:
  // Waits until the operations that were called have ended, or the deadline has passed. If the program
  // ends, waits for none that the other members never call. Returns whether all have ended.
  bool drainQueue(Farewell::How how, Deadline budget);

  LiveGroup& group_;
  DeviceHalf& devices_;
  std::atomic<bool> hasLeft_{false};
  Mutex mutex_;  // one leaveGroup() at a time
};

}  // namespace mooncake
