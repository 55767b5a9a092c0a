#pragma once

#include <cstdint>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "group/group.h"
#include "membership/rank_set.h"

namespace mooncake::ep {

// Which ranks of a group map each other's memory. What all of them need of another rank crosses
// the network once: one fetches it, and the others read it there. The same on all ranks.
class Hosts {
 public:
  // Every rank is a host of its own.
  Hosts() = default;
  // mapped[r]: whom rank r maps, itself included; empty: it is not there.
  Hosts(const std::vector<RankSet>& mapped, uint64_t leastSendBytes);
  // Collective: each rank says whom it maps, and how much it can send at once.
  static Result<Hosts> meet(Group& group, uint64_t sendBytes, Deadline deadline);

  // These ranks by host, ascending in each; the hosts by their lowest rank.
  std::vector<std::vector<int>> split(const std::vector<int>& ranks) const;
  // That every rank can send at once.
  uint64_t leastSendBytes() const { return leastSendBytes_; }

 private:
  std::vector<int> hostOf_;  // by rank: the lowest rank of its host
  uint64_t leastSendBytes_ = 0;
};

}  // namespace mooncake::ep
