#pragma once

#include <string>
#include <vector>

#include "engine/rendezvous/store.h"

namespace mooncake {

// Each member of a group publishes one value under `what`, and gets the values of all, in rank
// order. All members get the same: rank 0 confirms the values that it has seen. kTimeout names the
// ranks that did not come. kInterrupted: the confirmation in the store is of an earlier attempt,
// without us.
Result<std::vector<Bytes>> exchange(Store& store, const std::string& what, int rank, int size,
                                    ByteView mine, Deadline deadline);

// The values that the members of an exchange have published, in rank order, for a process that comes
// later. kRefused: the exchange has not ended. Values of later processes stand before them, the last
// one first.
Result<std::vector<Bytes>> published(Store& store, const std::string& what, Deadline deadline);
// Adds the value of a later process.
Status publishLater(Store& store, const std::string& what, ByteView value);

// Called by a member that could not make its group. Tells the other members, which otherwise see
// only that it is gone. Returns `own`, extended by the first member's report if `own` may be only a
// consequence.
Error tellFailure(Store& store, int rank, Error own);

}  // namespace mooncake
