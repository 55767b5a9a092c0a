// Cost: one exchange of slots, n-1 signals per rank. (The dissemination barrier of Hensgen, Finkel
// and Manber needs log2(n) rounds of one signal; we exchange all slots anyway, so that every rank
// learns who called what.)
#include "collectives/collectives.h"
#include "collectives/operation.h"

namespace mooncake {
namespace {

class Barrier final : public Algorithm {
  Status contribute(Operation& op) override { return op.begin(0); }
  Status conclude(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    return op.commit(Operation::When::kAllBegan);
  }
};

}  // namespace

Status barrier(Group& group, Deadline deadline) {
  Barrier barrier;
  return Operation(group, {.verb = Verb::kBarrier}, deadline).run(barrier);
}

}  // namespace mooncake
