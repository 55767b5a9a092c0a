#include "wires/cards/warm_up.h"

#include <algorithm>
#include <utility>

namespace mooncake {
namespace {

// Pause before a path that has not answered is probed again.
constexpr auto kPause = std::chrono::milliseconds(100);

}  // namespace

void WarmUp::reset(size_t paths) {
  isWarm_.assign(paths, false);
  nextProbes_ = {};
}

void WarmUp::answered(size_t path) {
  if (path < isWarm_.size()) isWarm_[path] = true;
}

void WarmUp::add(std::vector<uint64_t> keys, Deadline deadline, std::function<void(Status)> done) {
  callers_.push_back({std::move(keys), deadline, std::move(done)});
}

bool WarmUp::look(Clock::time_point now, const Paths& paths,
                  const std::function<bool(uint64_t)>& isThere) {
  const bool isAnyWarm = std::ranges::find(isWarm_, true) != isWarm_.end();
  const bool isAnyCold = !coldOnes(paths).empty();
  std::erase_if(callers_, [&](Caller& caller) {
    std::erase_if(caller.keys, isThere);
    const bool isWarm = isAnyWarm && !isAnyCold && caller.keys.empty();
    const bool isLate = now >= caller.deadline.when();
    if (isWarm) {
      caller.done({});
    } else if (isLate) {
      caller.done({ErrorCode::kTimeout, "not every card has reached it in time"});
    }
    return isWarm || isLate;
  });
  if (now < nextProbes_ || callers_.empty()) return false;
  nextProbes_ = now + kPause;
  return true;
}

std::vector<size_t> WarmUp::coldOnes(const Paths& paths) const {
  std::vector<size_t> cold;
  for (size_t i = 0; i < isWarm_.size(); ++i) {
    if (!isWarm_[i] && paths.isUp(i)) cold.push_back(i);
  }
  return cold;
}

void WarmUp::end(const Status& how) {
  for (const Caller& caller : std::exchange(callers_, {})) caller.done(how);
}

}  // namespace mooncake
