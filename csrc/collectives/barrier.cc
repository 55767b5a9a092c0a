#include "group/barrier.h"

#include "base/rank_list.h"
#include "collectives/collectives.h"

namespace mooncake {
namespace {

class MonitoredBarrier final : public Barrier {
 public:
  MonitoredBarrier(bool namesAll, std::chrono::milliseconds timeout)
      : namesAll_(namesAll), timeout_(timeout) {}

  Status complete(Operation& op) override {
    Status all = op.awaitAllBegun();
    if (all.code() == ErrorCode::kTimeout) return failed(op);
    MOONCAKE_TRY(std::move(all));
    return op.commit();
  }

 private:
  // Worded like Gloo's error, which callers look for.
  Status failed(Operation& op) const {
    std::vector<int> missing = op.missing();
    if (!namesAll_ && missing.size() > 1) missing.erase(missing.begin() + 1, missing.end());
    return {ErrorCode::kTimeout,
            "Rank " + std::to_string(op.group().rank()) + " timed out in monitoredBarrier: " +
                (missing.size() > 1 ? "Ranks " : "Rank ") + listRanks(missing) +
                " failed to pass monitoredBarrier in " + std::to_string(timeout_.count()) + " ms"};
  }

  const bool namesAll_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace

Status monitoredBarrier(Group& group, bool namesAll, std::chrono::milliseconds timeout) {
  MonitoredBarrier barrier(namesAll, timeout);
  return Operation(group, {.verb = Verb::kBarrier}, Deadline::after(timeout)).run(barrier);
}

}  // namespace mooncake
