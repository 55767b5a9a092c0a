#pragma once

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

// Passes `mine` to every other member of the group, over unix sockets. Returns the members' memory
// by rank; the own place has no descriptor. kUnsupported: a member is on another host, or in another
// network namespace. Collective.
Result<std::vector<SharedAllocation>> exchangeAllocations(Group& group,
                                                          const SharedAllocation& mine,
                                                          Deadline deadline);

}  // namespace mooncake
