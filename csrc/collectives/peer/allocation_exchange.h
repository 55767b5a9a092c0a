#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "base/result.h"
#include "device/peer_mappings.h"
#include "group/group.h"

namespace mooncake {

// Brings an agreement: returns ok if all members take part and all are ok. Otherwise an error, on
// all of them, with the text of the first member that has one. Collective.
Status agreeOnAll(Group& group, const Status& mine, Deadline deadline);

// Memory of a member, and the descriptor by which others map it.
struct SharedAllocation {
  PeerAllocation allocation;
  Fd descriptor;
};

// The memory of the members of one host, and the hosts of all.
struct HostAllocations {
  // By rank; empty for ranks of other hosts. That of this rank has no descriptor.
  std::vector<SharedAllocation> allocations;
  std::vector<uint64_t> hosts;  // by rank: bits of the ranks on its host. The same on all members
};

// Passes `mine` to every other member on this host, over unix sockets. A member that these do not
// reach counts as one of another host, and so do containers without a common network namespace.
// Collective.
Result<HostAllocations> exchangeAllocations(Group& group, const SharedAllocation& mine,
                                            Deadline deadline);

// Returns the hosts: by rank, bits of the ranks on its host. `reached` has the ranks that each rank
// reaches. Ranks of one host reach the same ones. A rank that reaches others is a host of its own,
// and so is each rank that it reaches.
std::vector<uint64_t> groupByHost(std::span<const uint64_t> reached);

// kUnsupported, and names a rank: members are on several hosts.
Status requireOneHost(const Group& group, std::span<const uint64_t> hosts);

}  // namespace mooncake
