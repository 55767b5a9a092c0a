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

}  // namespace mooncake
