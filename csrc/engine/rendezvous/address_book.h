#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/rendezvous/store.h"

namespace mooncake {

// Every member of a group publishes one value under `what` and gets everybody's, in rank order.
// kTimeout names the ranks that did not come.
Result<std::vector<Bytes>> exchange(Store& store, const std::string& what, int rank, int size,
                                    ByteView mine, Deadline deadline);

// The job's key: `own` when this rank was given one, else the one that rank 0 makes and hands out
// through the store, as secret as that store.
Result<Bytes> agreeOnJobKey(Store& store, const std::optional<std::string>& own, int rank,
                            Deadline deadline);

// Of a member that could not make its group: tells all others, who see only that it has gone, and
// says what the first one told where `own` may be no more than what followed from that.
Error tellFailure(Store& store, int rank, Error own);

}  // namespace mooncake
