#include "backend/host_calls.h"

#include <utility>

#include "backend/calls/collective_calls.h"
#include "backend/errors.h"
#include "backend/profile.h"
#include "base/mutex.h"
#include "collectives/collectives.h"

namespace mooncake {

HostCalls::WorkPtr HostCalls::carryOut(const Collective& call) {
  return submit(call, call.kind->onHost(call, *group_.group()));
}

HostCalls::WorkPtr HostCalls::submit(const Collective& call, HostRun run) {
  const auto work = newWork(call);
  auto plain = [parts = &group_.missingParts(), run = std::move(run),
                use = MissingParts::useOf(call), name = call.kind->name](Group& series) {
    Status status = run(series, nullptr);
    if (status.ok()) parts->ended(use, name, series);
    return status;
  };
  CallOrder& order = group_.order();
  if (order.replays()) {
    const Guard lock(order.mutex());
    order.follow(group_.line(), group_.queue(), work, nullptr, std::move(plain));
  } else {
    group_.queue()->submit(work, call.isAsync, std::move(plain));
  }
  return group_.batches().add(work);
}

void HostCalls::monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) {
  const auto run = [waitAllRanks, timeout = group_.effective(opts.timeout)](Group& series,
                                                                            InputFeed*) {
    return mooncake::monitoredBarrier(series, waitAllRanks, timeout);
  };
  Collective call = barrierCall(opts);
  call.isAsync = false;
  submit(call, run)->wait(kNoTimeout);
}

c10::intrusive_ptr<CollectiveWork> HostCalls::newWork(const Collective& call) {
  group_.refuseInForkedChild();
  const BackendOptions& options = group_.options();
  const Operand& input = call.input();
  const bool isOne = input.lists.size() == 1;
  const char* const event = call.kind->event ? call.kind->event : call.kind->name;
  const Profile profile =
      profileOf(options.name, event, isOne ? at::TensorList(input.list()) : input.all());
  return c10::make_intrusive<CollectiveWork>(group_.rank(), group_.size(), options.capacity,
                                             call.kind->type, group_.queue(), call.results(),
                                             profile, group_.hooks()->newKey());
}

bool HostCalls::acknowledgeLoss() {
  group_.refuseInForkedChild();
  throwIfError(group_.group()->usable());
  if (Replays* const replays = group_.order().replays()) replays->settle(group_.deadline());
  return group_.queue()->acknowledgeLoss(group_.deadline());
}

}  // namespace mooncake
