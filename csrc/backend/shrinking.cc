#include "backend/shrinking.h"

#include "backend/arguments.h"
#include "backend/child_options.h"
#include "backend/errors.h"

namespace mooncake {
namespace {

std::vector<int> inOrder(const GroupRanks& ranks) {
  std::vector<int> all;
  ranks.forEach([&](int rank) { all.push_back(rank); });
  return all;
}

}  // namespace

Shrinking::Shrinking(const LiveGroup& group, std::span<const int64_t> excluded)
    : group_(group), name_(group.options().groupName + "/shrink") {
  group_.refuseInForkedChild();
  if (group_.line().isRemoved()) throwIfError(group_.group()->usable());
  for (const int64_t rank : excluded) {
    if (rank < 0 || rank >= group_.size())
      refuse("shrink: rank " + std::to_string(rank) + " is not in a group of " +
             std::to_string(group_.size()));
    excluded_.add(static_cast<int>(rank));
  }
  if (excluded_.contains(group_.rank()))
    refuse("shrink: rank " + std::to_string(group_.rank()) +
           " excludes itself: only ranks that stay call it");
  for (int r = 0; r < group_.size(); ++r) {
    if (excluded_.contains(r)) continue;
    if (r == group_.rank()) rank_ = size();
    left_.push_back(r);
  }
}

void Shrinking::agree() {
  if (group_.line().isNewcomer()) return;  // it makes its groups alone
  const std::shared_ptr<Membership>& job = group_.job().membership();
  throwIfError(job->standing());
  std::vector<int> all;
  for (int r = 0; r < group_.size(); ++r) all.push_back(group_.jobRank(r));
  // All ranks that are left have this topic, also if their lists differ.
  const auto topics = orThrow(job->newTopics(name_ + " lists", all));
  ByteWriter mine;
  excluded_.write(mine);
  lists_ =
      std::make_unique<MemberExchange>(job,
                                       MemberExchange::Options{.group = name_,
                                                               .topic = topics.first,
                                                               .jobRanks = std::move(all),
                                                               .rank = group_.rank(),
                                                               .unawaited = excluded_,
                                                               .roster = group_.group()->roster()},
                                       mine.take());
  const auto lists = lists_->collect(group_.deadline());
  const Status agreed = lists.ok() ? compare(*lists) : lists.status();
  if (!agreed.ok()) lists_->giveUp(agreed.error());
  throwIfError(agreed);
}

Status Shrinking::compare(const std::vector<std::optional<Bytes>>& lists) const {
  for (const int r : left_) {
    const auto& list = lists[size_t(r)];
    if (!list) continue;  // lost
    ByteReader in(*list);
    const auto excluded = GroupRanks::read(in);
    MOONCAKE_TRY(in.finish("list of excluded ranks"));
    if (excluded == excluded_) continue;
    const auto group = group_.group();
    return {ErrorCode::kMismatch,
            group->nameRank(group_.rank()) + " shrinks group '" + group_.options().groupName +
                "' without " + nameRanks(inOrder(excluded_)) + ", " + group->nameRank(r) +
                " without " + nameRanks(inOrder(excluded)) +
                ": name the same ranks in ranks_to_exclude on all ranks that stay"};
  }
  return {};
}

BackendOptions Shrinking::options(const c10d::Backend::Options* opts) const {
  BackendOptions options = optionsOfChild(group_, left_);
  options.groupName = name_;
  if (opts) options.timeout = opts->timeout;
  return options;
}

}  // namespace mooncake
