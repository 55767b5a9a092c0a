#include "backend/replacing.h"

#include <algorithm>
#include <string>

#include "backend/arguments.h"

namespace mooncake {

bool Replacing::isReady(int rank) const {
  return group_.isOpen() && rank < group_.size() && group_.line().isReady(rank);
}

std::vector<int> Replacing::recover(const std::vector<int>& ranks, std::chrono::milliseconds ready,
                                    GroupLine::Unready unready) {
  group_.refuseInForkedChild();
  const std::string self = "rank " + std::to_string(group_.rank());
  const std::string name = self + ", recover_ranks of group '" + group_.options().groupName + "'";
  if (ranks.empty())
    refuse(name + " got no ranks: name lost ones, for which get_peer_state is True");
  for (auto rank = ranks.begin(); rank != ranks.end(); ++rank) {
    if (*rank < 0 || *rank >= group_.size())
      refuse(name + ": rank " + std::to_string(*rank) + " is not in a group of " +
             std::to_string(group_.size()));
    if (std::find(ranks.begin(), rank, *rank) != rank)
      refuse(name + ": rank " + std::to_string(*rank) + " stands twice in the list");
  }
  if (group_.line().isNewcomer())
    throwError({ErrorCode::kRefused, name + ": it is not in the group yet: call join_group first"});
  throwIfError(devices_.mayMove());
  const Deadline deadline = group_.deadline();
  if (!group_.queue()->drain(deadline))
    throwError({ErrorCode::kTimeout, name + ": calls before it have not ended. wait() for them"});
  return orThrow(
      group_.line().recover(ranks, deadline.earlier(Deadline::after(ready)), deadline, unready));
}

void Replacing::join() {
  group_.refuseInForkedChild();
  if (!group_.line().isNewcomer())
    throwError({ErrorCode::kRefused, "join_group: rank " + std::to_string(group_.rank()) +
                                         " is in group '" + group_.options().groupName +
                                         "' already; only a process that was started to replace a "
                                         "rank joins"});
  const Deadline deadline = group_.deadline();
  if (!group_.queue()->drain(deadline))
    throwError({ErrorCode::kTimeout, "join_group on rank " + std::to_string(group_.rank()) +
                                         ": calls before it have not ended. wait() for them"});
  throwIfError(group_.line().join(deadline));
}

}  // namespace mooncake
