#include "group/barrier.h"

namespace mooncake {

Status Barrier::publish(Operation& op) { return op.begin(0); }

Status Barrier::complete(Operation& op) {
  MOONCAKE_TRY(op.awaitAllBegun());
  return op.commit();
}

Status barrier(Group& group, Deadline deadline) {
  Barrier barrier;
  return Operation(group, {.verb = Verb::kBarrier}, deadline).run(barrier);
}

}  // namespace mooncake
