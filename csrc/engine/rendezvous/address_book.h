#pragma once

#include <string>
#include <vector>

#include "engine/rendezvous/store.h"

namespace mooncake {

// Every member of a group publishes one value under `what` and gets everybody's, in rank order, the
// same on all of them: rank 0 confirms what it has seen. kTimeout names the ranks that did not
// come. kInterrupted: what stands there was confirmed for others than us, in an earlier attempt.
Result<std::vector<Bytes>> exchange(Store& store, const std::string& what, int rank, int size,
                                    ByteView mine, Deadline deadline);

// Of a member that could not make its group: tells all others, who see only that it has gone, and
// says what the first one told where `own` may be no more than what followed from that.
Error tellFailure(Store& store, int rank, Error own);

}  // namespace mooncake
