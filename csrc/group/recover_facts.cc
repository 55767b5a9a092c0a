#include "group/recover_facts.h"

#include <algorithm>

namespace mooncake {

int proposerOf(const Group& group) {
  for (int r = 0; r < group.rank(); ++r) {
    if (group.agent().isActive(r)) return r;
  }
  return group.rank();
}

std::vector<bool> activeOf(const Group& group) {
  std::vector<bool> active;
  for (int r = 0; r < group.size(); ++r) active.push_back(group.agent().isActive(r));
  return active;
}

std::vector<bool> membersOf(const Group& group, const LineMembers& line, bool keepsLost) {
  std::vector<bool> members = activeOf(group);
  for (size_t r = 0; keepsLost && r < members.size(); ++r)
    members[r] = members[r] || group.roster()->isHeld(line.jobRank(int(r)));
  return members;
}

bool isChange(const std::vector<bool>& active, const std::vector<bool>& members,
              const Successor& wanted) {
  const auto isActive = [&](int rank) { return bool(active[size_t(rank)]); };
  const auto isMember = [&](int rank) { return bool(members[size_t(rank)]); };
  return std::ranges::none_of(wanted.newcomers, isActive, &Newcomer::rank) &&
         (!wanted.newcomers.empty() || std::ranges::any_of(wanted.absent, isMember));
}

void setAbsent(const std::vector<bool>& active, const std::vector<int>& leave,
               Successor& successor) {
  for (int r = 0; r < int(active.size()); ++r) {
    const bool isOut = !active[size_t(r)] || std::ranges::binary_search(leave, r);
    if (isOut && !successor.hasNewcomerFor(r)) successor.absent.push_back(r);
  }
}

void setExtent(const Group& group, std::vector<int> retired, Successor& successor) {
  int extent = group.extent();
  for (const int rank : successor.absent) {
    if (group.agent().isActive(rank)) retired.push_back(rank);
  }
  for (const Newcomer& newcomer : successor.newcomers) {
    std::erase(retired, newcomer.rank);
    extent = std::max(extent, newcomer.rank + 1);
  }
  std::ranges::sort(retired);
  while (std::ranges::binary_search(retired, extent - 1)) --extent;
  std::erase_if(retired, [&](int rank) { return rank >= extent; });
  successor.extent = uint32_t(extent);
  successor.retired = std::move(retired);
}

bool waitsForCaller(const Group& group) {
  const Renewal& renewal = group.renewal();
  return renewal.close() && !renewal.hasEnded() && !group.agent().state().isBusy;
}

Error notReady(const Group& group, const std::vector<int>& missing) {
  return {ErrorCode::kTimeout,
          group.nameRank(group.rank()) + ": no process is ready to take the place of " +
              group.nameRanks(missing) + " in group '" + group.name() +
              "': start one with MOONCAKE_REJOIN=1 or is_extension=True, which calls "
              "join_group, and ask get_peer_state before"};
}

Error notMoved(const Group& group, const Successor& wanted, const Status& why) {
  std::vector<int> ranks;
  for (const Newcomer& newcomer : wanted.newcomers) ranks.push_back(newcomer.rank);
  const std::string what = ranks.empty() ? "taken " + group.nameRanks(wanted.absent) + " out"
                                         : "let " + group.nameRanks(ranks) + " in";
  return {ErrorCode::kTimeout,
          group.nameRank(group.rank()) + ": group '" + group.name() + "' has not " + what +
              " before the timeout: a member is in a call that the others do not call, or is "
              "stopped. Nothing has changed" +
              (why.ok() ? "" : " (" + why.error().message + ")")};
}

Error anotherChange(const Group& group) {
  return {ErrorCode::kRefused,
          group.nameRank(group.rank()) + ": another change of group '" + group.name() +
              "' is about to happen behind a call that other members are in and this rank has not "
              "begun: call it again after that call"};
}

Error notYetOut(const Group& group) {
  return {ErrorCode::kTimeout,
          group.nameRank(group.rank()) + " is not out of group '" + group.name() +
              "' before the timeout: a member has not ended the call before, and may need this "
              "rank for it. It will be out behind the call that other members are in: make that "
              "call, or call it again"};
}

Error notLetIn(const GroupOptions& group) {
  const std::vector<int> own = {group.rank};
  return {ErrorCode::kTimeout, nameRanks(own, group.globalRanks) + " was not let into group '" +
                                   group.name +
                                   "': no member has called recover_ranks for it in time"};
}

GroupOptions withExtent(GroupOptions options, int extent) {
  options.extent = extent;
  return options;
}

GroupOptions withMembers(GroupOptions options, const Successor& successor) {
  // In a group that began a job, programs have other numbers for the ranks.
  if (options.globalRanks == options.jobRanks) options.globalRanks = successor.jobRanks;
  options.jobRanks = successor.jobRanks;
  return withExtent(std::move(options), int(successor.extent));
}

Error notActive(const Group& group, const std::string& how) {
  return {ErrorCode::kRefused, "invalid state: this rank is not active in group '" + group.name() +
                                   "': " + group.nameRank(group.rank()) + " " + how +
                                   ". It comes back with join_group, which members answer with "
                                   "activate_ranks"};
}

}  // namespace mooncake
