#include "backend/child_options.h"

#include "backend/arguments.h"
#include "backend/errors.h"

namespace mooncake {
namespace {

// This rank comes first.
std::vector<MergeMember> mergeMembers(const LiveGroup& ours) {
  const std::shared_ptr<const Group> group = ours.group();
  std::vector<MergeMember> members{{.id = ours.job().engine()->id()}};
  for (int r = 0; r < ours.size(); ++r) {
    const auto& peer = ours.job().membership()->peer(ours.jobRank(r));
    if (!peer) continue;
    MergeMember& member = members.emplace_back(MergeMember{.id = peer->id});
    if (!group->isGone(r)) continue;
    member.lost = group->nameRank(r) + " of group '" + ours.options().groupName + "' (" +
                  group->whyGone(r) + ")";
  }
  return members;
}

}  // namespace

BackendOptions optionsOfChild(const LiveGroup& group, const std::vector<int>& ranks) {
  BackendOptions child = group.options();
  child.activeRanks = at::Tensor();
  child.capacity = 0;
  child.isNewcomer = group.line().isNewcomer();  // not any more, once it has joined
  child.globalRanks.clear();
  for (const int rank : ranks) child.globalRanks.push_back(group.jobRank(rank));
  return child;
}

BackendOptions optionsOfSplit(const LiveGroup& group, const std::vector<int>& ranks,
                              const c10d::Backend::Options& opts) {
  group.refuseInForkedChild();
  throwIfError(group.group()->usable());
  for (const int rank : ranks) {
    if (rank < 0 || rank >= group.size())
      refuse("split: rank " + std::to_string(rank) + " is not in a group of " +
             std::to_string(group.size()));
  }
  BackendOptions split = optionsOfChild(group, ranks);
  split.groupName = groupNameIn(opts);
  split.timeout = opts.timeout;
  return split;
}

BackendOptions optionsOfMerge(const LiveGroup& group, const c10d::Backend::Options& opts) {
  BackendOptions merged = optionsOfSplit(group, {}, opts);
  merged.mergeMembers = [&group] { return mergeMembers(group); };
  return merged;
}

}  // namespace mooncake
