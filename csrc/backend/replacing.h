#pragma once

#include <vector>

#include "backend/device_half.h"
#include "backend/live_group.h"
#include "base/mutex.h"

namespace mooncake {

// Lets new processes take the places of lost ranks in a group, and takes ranks out: the calls of
// members and newcomers. All throw.
class Replacing {
 public:
  Replacing(LiveGroup& group, DeviceHalf& devices) : group_(group), devices_(devices) {}

  // Names the process that waits in join() to take the place of this lost rank. 0: there is none.
  uint64_t readyKey(int rank) const;
  // Members: lets processes in for these ranks. Waits for the caller's earlier calls, and for
  // processes that come within `ready`. Ranks that are in are skipped: every member may call it, one
  // has to. Returns the ranks that were ready and are lost again.
  // `keys`, of all ranks or empty: only the processes that readyKey() named so; ranks of others are
  // dropped, and ranks for which none comes.
  std::vector<int> recover(const std::vector<int>& ranks, std::chrono::milliseconds ready,
                           const std::vector<uint64_t>& keys);
  // Members: takes these ranks out, this one, too, if it is among them. Waits for the caller's earlier
  // calls. Ranks that are out are skipped: every member may call it, one has to.
  void deactivate(const std::vector<int>& ranks);
  // Newcomers: waits until the members have let this rank in. A process without which the job went on
  // first enters the job again; then each of its groups is joined by itself.
  void join();

 private:
  Deadline begin(const std::string& name, const std::vector<int>& ranks, const char* which);
  bool isOutOfJob() const;
  void enterAgain(Deadline deadline) EXCLUDES(enteringMutex_);

  LiveGroup& group_;
  DeviceHalf& devices_;
  Mutex enteringMutex_;
};

}  // namespace mooncake
