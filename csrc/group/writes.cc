#include "group/writes.h"

#include <algorithm>

#include "base/failpoint.h"
#include "group/operation.h"

namespace mooncake {
namespace {

// Least time for writes to end by themselves. Far more than they need if no path has failed.
constexpr auto kGrace = std::chrono::milliseconds(100);
constexpr auto kLook = std::chrono::milliseconds(1);  // interval between looks at confirmations
// Number of failure timeouts within which a peer that lives must confirm, as for a flush.
constexpr int kBudgets = 10;

}  // namespace

Status Writes::start(int to, const RemoteRegion& region, uint64_t offset,
                     std::span<const std::byte> data, size_t word) {
  failpoint("write-data");
  const Window& window = op_.group().window();
  Target& target = targets_.try_emplace({to, region.key}, region, &window.bell()).first->second;
  const auto begun = window.write(to, region, offset, data, {.offset = word, .stamp = op_.stamp_},
                                  target.completion);
  // A channel that broke, or a rank that we have fenced, is the membership's business.
  const ErrorCode code = begun.code();
  return code == ErrorCode::kPeerLost || code == ErrorCode::kAborted ? Status() : begun;
}

void Writes::end() {
  const auto hasLanded = [](const auto& one) { return one.second.hasLanded(); };
  if (!std::ranges::all_of(targets_, hasLanded)) giveUp();
  targets_.clear();
}

// This rank has not reported yet, so the other ranks wait for it, and their patience does not run.
// This wait needs no other caller: cards write, and the progress threads of the targets confirm.
void Writes::giveUp() {
  failpoint("end-writes");
  Group& group = op_.group();
  const Window& window = group.window();
  const auto failureTimeout = group.engine().env().failureTimeout;
  const auto budget = Deadline::after(kBudgets * failureTimeout);
  const auto most = Deadline::after(failureTimeout).earlier(op_.deadline_);
  const auto isOver = [&](const auto& one) {
    return one.second.completion.finished() || group.isGone(one.first.first);
  };
  const auto isOverOrSkipped = [&](const auto& one) {
    return isOver(one) || (op_.patience_ && !op_.hasBegun(one.first.first));
  };
  wait(Deadline::after(kGrace), [&] { return std::ranges::all_of(targets_, isOver); });
  wait(most, [&] { return std::ranges::all_of(targets_, isOverOrSkipped); });
  // A write that ended with an error is like one that is cancelled: parts of it may still come. The
  // job does not use the memory of a lost rank any more.
  std::vector<std::pair<int, uint64_t>> retirements;
  for (const auto& [to, target] : targets_) {
    if (target.hasLanded()) continue;
    if (!target.completion.finished()) window.cancel(target.completion);
    const int rank = to.first;
    if (!group.isGone(rank)) retirements.emplace_back(rank, window.retire(rank, target.region));
  }
  while (group.usable().ok()) {
    std::erase_if(retirements, [&](const auto& one) {
      return group.isGone(one.first) || window.isRetired(one.first, one.second);
    });
    if (retirements.empty()) return;
    if (budget.passed()) {
      group.fail({ErrorCode::kTimeout, "group '" + group.name() + "' on " +
                                           group.nameRank(group.rank()) + ": " +
                                           group.nameRank(retirements.front().first) +
                                           " does not confirm that no write of this rank comes "
                                           "late. Destroy the group and make it again"});
    }
    wait(Deadline::after(kLook), [] { return false; });
  }
}

// Waits until `isOver`, the deadline, or a failure of the group.
template <typename IsOver>
void Writes::wait(Deadline deadline, const IsOver& isOver) const {
  Waiter waiter = op_.waiter_;
  waiter.deadline = deadline;
  do {
    waiter.generation = waiter.interrupt.generation();
  } while (op_.group().usable().ok() && waiter.until(isOver) == WaitResult::kInterrupted);
}

}  // namespace mooncake
