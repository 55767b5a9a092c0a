#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "wires/packets/paths.h"

namespace mooncake {

// The callers of one channel's warmUp(), and the paths that are still cold: a path is warm once the
// peer has answered a probe over it. Decides only. The channel sends probes, and guards this with
// its lock.
class WarmUp {
 public:
  // Begins a connection with this number of paths, all cold. 0: the peer is not known yet.
  void reset(size_t paths);
  // Notes that a probe was answered over this path.
  void answered(size_t path);

  // Adds a caller that waits for the peer's keys of these regions, and for the paths. `done` runs
  // once, in look() or end().
  void add(std::vector<uint64_t> keys, Deadline deadline, std::function<void(Status)> done);
  bool hasCallers() const { return !callers_.empty(); }
  // Ends the callers that have everything, and with kTimeout the late callers. `isThere` says
  // whether the answer for the keys of a region has come. Returns whether cold paths are to be
  // probed now, at most every 100 ms.
  bool look(Clock::time_point now, const Paths& paths,
            const std::function<bool(uint64_t region)>& isThere);
  // Returns the paths that are up and cold. Other probes bring back the paths that are left out.
  std::vector<size_t> coldOnes(const Paths& paths) const;
  // Ends all callers.
  void end(const Status& how);

 private:
  struct Caller {
    std::vector<uint64_t> keys;  // regions without an answer
    Deadline deadline;
    std::function<void(Status)> done;
  };
  std::vector<bool> isWarm_;  // by path
  std::vector<Caller> callers_;
  Clock::time_point nextProbes_;
};

}  // namespace mooncake
