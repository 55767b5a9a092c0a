#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"
#include "ep/host_table.h"
#include "group/group.h"
#include "membership/rank_set.h"

namespace mooncake::ep {

// Which ranks of a group map each other's memory. What all of them need of another rank crosses
// the network once: it comes to one of them, and the others read it there. The same on all ranks.
class Hosts {
 public:
  // What a rank says of its buffer.
  struct Memory {
    RankSet mapped;  // whom it maps, itself included; empty: it is not there
    uint64_t sendBytes = 0;
    RemoteRegion region;  // the send memory, to put into
  };
  explicit Hosts(std::vector<Memory> all);  // by rank
  // Collective. Whom we map is added here.
  static Result<Hosts> meet(Group& group, Memory ours, Deadline deadline);

  // These ranks by host, ascending in each; the hosts by their lowest rank.
  std::vector<std::vector<int>> split(const std::vector<int>& ranks) const;
  std::vector<std::vector<int>> splitAll() const { return all()->hosts(); }
  // The same as tables. An attempt of all ranks, the usual one, makes no new one.
  std::shared_ptr<const HostTable> tableOf(const std::vector<int>& ranks) const;
  const std::shared_ptr<const HostTable>& all() const { return table_; }
  // Of the rank that has the least.
  uint64_t leastSendBytes() const { return leastSendBytes_; }
  const Memory& memory(int rank) const { return all_[size_t(rank)]; }

 private:
  std::vector<Memory> all_;
  std::vector<int> hostOf_;  // by rank: the lowest rank of its host
  uint64_t leastSendBytes_;
  std::shared_ptr<const HostTable> table_;  // of all ranks
};

}  // namespace mooncake::ep
