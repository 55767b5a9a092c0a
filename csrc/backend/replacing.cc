#include "backend/replacing.h"

#include <algorithm>
#include <string>

#include "backend/arguments.h"

namespace mooncake {

uint64_t Replacing::readyKey(int rank) const {
  return group_.isOpen() && rank < group_.room() ? group_.line().readyKey(rank) : 0;
}

std::vector<int> Replacing::recover(const std::vector<int>& ranks, std::chrono::milliseconds ready,
                                    const std::vector<uint64_t>& keys) {
  std::map<int, uint64_t> byRank;
  for (size_t i = 0; i < ranks.size() && i < keys.size(); ++i) byRank[ranks[i]] = keys[i];
  using Unready = GroupLine::Unready;
  const Unready unready = keys.empty() ? Unready::kIsError : Unready::kIsDropped;
  const Deadline deadline =
      begin("recover_ranks", ranks, "name lost ones, for which get_peer_state is True");
  return orThrow(group_.line().recover(ranks, deadline.earlier(Deadline::after(ready)), deadline,
                                       unready, byRank));
}

void Replacing::deactivate(const std::vector<int>& ranks) {
  const auto group = group_.group();
  bool staysOne = group_.line().isNewcomer();
  for (int r = 0; r < group_.size(); ++r)
    staysOne = staysOne || (group->agent().isActive(r) && std::ranges::count(ranks, r) == 0);
  const bool wasRemoved = group_.line().isRemoved();
  if (wasRemoved && std::ranges::all_of(ranks, [&](int r) { return r == group_.rank(); }) &&
      !ranks.empty())
    return;
  const Deadline deadline = begin("deactivate_ranks", ranks, "name ranks of the group");
  if (!staysOne)
    refuse("deactivate_ranks on rank " + std::to_string(group_.rank()) +
           " would leave no rank in group '" + group_.options().groupName +
           "': destroy the group instead");
  throwIfError(group_.line().remove(ranks, deadline));
  group_.showLosses();
}

// Checks a call of a member, and waits for the calls before it.
Deadline Replacing::begin(const std::string& call, const std::vector<int>& ranks,
                          const char* which) {
  group_.refuseInForkedChild();
  const std::string self = "rank " + std::to_string(group_.rank());
  const std::string name = self + ", " + call + " of group '" + group_.options().groupName + "'";
  if (ranks.empty()) refuse(name + " got no ranks: " + which);
  for (auto rank = ranks.begin(); rank != ranks.end(); ++rank) {
    if (*rank < 0 || *rank >= group_.room())
      refuse(name + ": rank " + std::to_string(*rank) + " is not in a group of " +
             std::to_string(group_.size()) +
             (group_.room() > group_.size()
                  ? ", which has room for " + std::to_string(group_.room())
                  : ""));
    if (std::find(ranks.begin(), rank, *rank) != rank)
      refuse(name + ": rank " + std::to_string(*rank) + " stands twice in the list");
  }
  if (group_.line().isRemoved()) throwIfError(group_.group()->usable());
  if (group_.line().isNewcomer())
    throwError({ErrorCode::kRefused, name + ": it is not in the group yet: call join_group first"});
  throwIfError(devices_.mayMove());
  const Deadline deadline = group_.deadline();
  if (!group_.queue()->drain(deadline))
    throwError({ErrorCode::kTimeout, name + ": calls before it have not ended. wait() for them"});
  return deadline;
}

void Replacing::join() {
  group_.refuseInForkedChild();
  const bool isOut = isOutOfJob();
  if (!isOut && !group_.line().isNewcomer())
    throwError({ErrorCode::kRefused, "join_group: rank " + std::to_string(group_.rank()) +
                                         " is in group '" + group_.options().groupName +
                                         "' already; only a process that was started to replace a "
                                         "rank joins, or one that is out of the group"});
  if (isOut) throwIfError(devices_.mayMove());
  const Deadline deadline = group_.deadline();
  if (!group_.queue()->drain(deadline))
    throwError({ErrorCode::kTimeout, "join_group on rank " + std::to_string(group_.rank()) +
                                         ": calls before it have not ended. wait() for them"});
  enterAgain(deadline);
  throwIfError(group_.line().join(deadline));
}

// Whether the job, or the job of which this group was a part, went on without this process.
bool Replacing::isOutOfJob() const {
  const auto membership = group_.job().membership();
  return !membership->standing().ok() || group_.line().job() != membership;
}

void Replacing::enterAgain(Deadline deadline) {
  Lock lock(enteringMutex_);
  if (!isOutOfJob()) return;
  group_.job().enterAgain(deadline);
  const auto membership = group_.job().membership();
  if (group_.line().job() != membership) throwIfError(group_.line().enterAgain(membership));
}

}  // namespace mooncake
