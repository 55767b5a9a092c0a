#include "backend/group_facts.h"

#include "backend/arguments.h"
#include "backend/errors.h"
#include "group/group_state.h"

namespace mooncake {

Status GroupFacts::usable() const {
  return group_.isOpen() ? group_.group()->usable() : Status(ErrorCode::kAborted, "");
}

uint64_t GroupFacts::epoch() const {
  return group_.isOpen() ? group_.job().membership()->view().epoch : 0;
}

uint64_t GroupFacts::called() const { return group_.isOpen() ? group_.queue()->called() : 0; }

std::vector<RankEvidence> GroupFacts::evidence() const {
  if (!group_.isOpen()) return {};
  return evidenceIn(*group_.group(), [this](int rank) { return group_.jobRank(rank); });
}

std::vector<int> GroupFacts::survivors() const {
  if (!group_.isOpen() || group_.line().isRemoved()) return {};
  const auto group = group_.group();
  std::vector<int> ranks;
  for (int r = 0; r < group->size(); ++r) {
    if (group->agent().isActive(r)) ranks.push_back(r);
  }
  return ranks;
}

std::vector<int> GroupFacts::jobRanks() const {
  std::vector<int> ranks;
  for (int r = 0; group_.isOpen() && r < group_.size(); ++r) ranks.push_back(group_.jobRank(r));
  return ranks;
}

at::Tensor GroupFacts::activeRanks() const {
  group_.activeRanks()->push();
  return group_.activeRanks()->tensor();
}

void GroupFacts::checkStanding() const {
  if (group_.isOpen()) throwIfError(group_.line().job()->standing());
}

JoinToken GroupFacts::joinToken() const {
  group_.refuseInForkedChild();
  if (!group_.isOpen()) throwError({ErrorCode::kAborted, "the process group was destroyed"});
  return group_.job().joinToken();
}

std::string GroupFacts::state() const {
  group_.refuseInForkedChild();
  return describeState(*group_.group());
}

std::string GroupFacts::transportTo(int rank) const {
  if (rank < 0 || rank >= group_.size())
    refuse("rank " + std::to_string(rank) + " is not in a group of " +
           std::to_string(group_.size()));
  return group_.group()->window().transportName(rank);
}

}  // namespace mooncake
