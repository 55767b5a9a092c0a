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

// Brings an agreement: returns ok if all members are ok, as far as they are not lost. Otherwise an
// error, on all of them, with the text of the first member that has one. kPeerLost: see
// gatherBlocks(). Collective.
Status agreeOnAll(Group& group, const Status& mine, Deadline deadline);

// Memory of a member, and the descriptor by which other members map it.
struct SharedAllocation {
  PeerAllocation allocation;
  Fd descriptor;
};

// The memory of the members of one host, and the hosts of all.
struct HostAllocations {
  // By rank; empty for ranks of other hosts and lost ones. This rank's has no descriptor.
  std::vector<SharedAllocation> allocations;
  // By rank: bits of the ranks on its host; 0 for lost ranks. The same on all members.
  std::vector<uint64_t> hosts;
};

// Passes `mine` to every other member on this host, over unix sockets. A member that these do not
// reach counts as one of another host, and so do containers without a common network namespace.
// Collective.
Result<HostAllocations> exchangeAllocations(Group& group, const SharedAllocation& mine,
                                            Deadline deadline);

// Returns the hosts: by rank, bits of the ranks on its host. `reached` has the ranks that each rank
// reaches. Ranks of one host reach the same ones. A rank that reaches different ones is a host of
// its own, and so is each rank that it reaches. A lost rank reaches none, itself included, and is
// on no host.
std::vector<uint64_t> groupByHost(std::span<const uint64_t> reached);

// kUnsupported, and names a rank: members are on several hosts.
Status requireOneHost(const Group& group, std::span<const uint64_t> hosts);

}  // namespace mooncake
