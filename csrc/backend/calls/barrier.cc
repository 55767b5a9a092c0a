#include "backend/calls/collective_calls.h"
#include "collectives/collectives.h"

namespace mooncake {
namespace {

HostRun barrierOnHost(const Collective& call, const Group&) {
  return [timeout = call.timeout](Group& series, InputFeed*) {
    return barrier(series, Deadline::after(timeout));
  };
}

constexpr CollectiveKind kBarrier{c10d::OpType::BARRIER, "barrier", barrierOnHost};

}  // namespace

Collective barrierCall(const c10d::BarrierOptions& opts) {
  return {.kind = &kBarrier, .timeout = opts.timeout, .isAsync = opts.asyncOp};
}

}  // namespace mooncake
