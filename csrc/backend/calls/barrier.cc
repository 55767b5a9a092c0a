#include "backend/calls/collective_calls.h"
#include "collectives/collectives.h"

namespace mooncake {
namespace {

HostRun barrierOnHost(const Collective& call, Group& group) {
  return [&group, timeout = call.timeout](InputFeed*) {
    return barrier(group, Deadline::after(timeout));
  };
}

constexpr CollectiveKind kBarrier{c10d::OpType::BARRIER, "barrier", barrierOnHost};

}  // namespace

Collective barrierCall(const c10d::BarrierOptions& opts) {
  return {.kind = &kBarrier, .timeout = opts.timeout, .isAsync = opts.asyncOp};
}

}  // namespace mooncake
