// Cost: one exchange of slots, n-1 signals per rank. (The dissemination barrier of Hensgen, Finkel
// and Manber needs log2(n) rounds of one signal; we exchange all slots anyway, so that every rank
// learns who called what.)
#include "collectives/collectives.h"
#include "collectives/operation.h"

namespace mooncake {
namespace {

class Barrier : public Algorithm {
  Status publish(Operation& op) override { return op.begin(0); }
  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    return op.commit();
  }
};

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
  // The words that callers of Gloo's look for.
  Status failed(Operation& op) const {
    const std::vector<int> missing = op.missing();
    std::string who;
    for (const int r : missing) {
      who += (who.empty() ? "" : ", ") + std::to_string(r);
      if (!namesAll_) break;
    }
    return {ErrorCode::kTimeout,
            "Rank " + std::to_string(op.group().rank()) + " timed out in monitoredBarrier: " +
                (namesAll_ && missing.size() > 1 ? "Ranks " : "Rank ") + who +
                " failed to pass monitoredBarrier in " + std::to_string(timeout_.count()) + " ms"};
  }

  const bool namesAll_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace

Status barrier(Group& group, Deadline deadline) {
  Barrier barrier;
  return Operation(group, {.verb = Verb::kBarrier}, deadline).run(barrier);
}

Status monitoredBarrier(Group& group, bool namesAll, std::chrono::milliseconds timeout) {
  MonitoredBarrier barrier(namesAll, timeout);
  return Operation(group, {.verb = Verb::kBarrier}, Deadline::after(timeout)).run(barrier);
}

}  // namespace mooncake
