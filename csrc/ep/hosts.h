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

// The hosts of a group: the ranks of a host map each other's memory. Data that several of them need
// from another rank crosses the network once: one of them gets it, and the other ranks read it
// there. Equal on all ranks.
class Hosts {
 public:
  // A rank's description of its buffer.
  struct Memory {
    GroupRanks mapped;  // ranks that it maps, itself included; empty: it takes no part
    uint64_t sendBytes = 0;
    RemoteRegion region;  // region of the send memory, for puts
  };
  explicit Hosts(std::vector<Memory> all);  // by rank
  // Collective. Fills in `mapped` of our description. A rank without memory gives its error. Then
  // all ranks return one error, which names that rank.
  static Result<Hosts> meet(Group& group, Result<Memory> ours, Deadline deadline);

  // Splits ranks by host: ascending within a host, the hosts by their lowest rank.
  std::vector<std::vector<int>> split(const std::vector<int>& ranks) const;
  std::vector<std::vector<int>> splitAll() const { return all()->hosts(); }
  // The same as a table. An attempt of all ranks, the usual one, needs no new table.
  std::shared_ptr<const HostTable> tableOf(const std::vector<int>& ranks) const;
  const std::shared_ptr<const HostTable>& all() const { return table_; }
  // Bytes of the smallest send memory of all ranks.
  uint64_t leastSendBytes() const { return leastSendBytes_; }
  const Memory& memory(int rank) const { return all_[size_t(rank)]; }

 private:
  std::vector<Memory> all_;
  std::vector<int> hostOf_;  // by rank: the lowest rank of its host
  uint64_t leastSendBytes_;
  std::shared_ptr<const HostTable> table_;  // of all ranks
};

}  // namespace mooncake::ep
