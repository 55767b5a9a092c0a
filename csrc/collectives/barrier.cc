// Cost: one exchange of slots, n-1 signals per rank. (The dissemination barrier of Hensgen, Finkel
// and Manber needs log2(n) rounds of one signal; we exchange all slots anyway, so that every rank
// learns who called what.)
#include "collectives/collectives.h"
#include "collectives/operation.h"

namespace mooncake {

Status barrier(Group& group, Deadline deadline) {
  Operation op(group, {.verb = Verb::kBarrier}, deadline);
  MOONCAKE_TRY(op.open());
  MOONCAKE_TRY(op.begin(0));
  MOONCAKE_TRY(op.awaitAllBegun());
  return op.commit();
}

}  // namespace mooncake
