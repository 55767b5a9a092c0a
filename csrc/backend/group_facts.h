#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/live_group.h"
#include "backend/rank_evidence.h"

namespace mooncake {

// What programs may ask about a group and its ranks.
class GroupFacts {
 public:
  explicit GroupFacts(const LiveGroup& group) : group_(group) {}

  // Whether later calls can succeed, and why not.
  Status usable() const;
  uint64_t epoch() const;   // of the job's view
  uint64_t called() const;  // number of operations since the last loss that the caller has seen
  std::vector<RankEvidence> evidence() const;
  // Ranks that are in the last view, as activeRanks() shows them, and have not left the group.
  std::vector<int> survivors() const;
  std::vector<int> jobRanks() const;  // of the ranks that programs see
  // Brings the tensor up to date.
  at::Tensor activeRanks() const;
  at::Tensor activeRanksOnHost() const { return group_.activeRanks()->onHost(); }
  const char* onFailure() const { return group_.options().raises ? "raise" : "continue"; }
  // Throws the error of every later call, if this rank is out of the job.
  void checkStanding() const;
  JoinToken joinToken() const;  // see Job::joinToken(); throws
  // Describes the state of the group in words: see describeState().
  std::string state() const;
  // "shm", "tcp", ...: the wire to a rank.
  std::string transportTo(int rank) const;

 private:
  const LiveGroup& group_;
};

}  // namespace mooncake
