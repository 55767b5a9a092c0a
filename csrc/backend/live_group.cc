#include "backend/live_group.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/arguments.h"
#include "backend/errors.h"
#include "collectives/mailbox.h"

namespace mooncake {
namespace {

// torch's new_group([0, 0]) would wait for a rank that does not exist.
void checkRanks(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  const auto twice = std::ranges::adjacent_find(ranks);
  if (twice != ranks.end())
    refuse("rank " + std::to_string(*twice) + " stands twice in the list of the group's ranks");
}

// Its destructor never runs.
template <typename T>
void leakOne(T& owner) {
  new T(std::move(owner));
}

}  // namespace

LiveGroup::LiveGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                     BackendOptions options, std::shared_ptr<ActiveRanks> activeRanks,
                     const LiveGroup* world)
    : rank_(rank),
      size_(size),
      options_(std::move(options)),
      isWithinWorld_(world != nullptr),
      activeRanks_(std::move(activeRanks)) {
  checkRanks(options_.globalRanks);
  const Deadline init = deadline();
  if (options_.capacity == 0) options_.capacity = size;
  if (world) {
    // A forked child makes no groups: it has no threads of the engine.
    world->refuseInForkedChild();
    job_ = world->job_;
    if (!job_) throwError({ErrorCode::kAborted, kDestroyed});
    options_.groupEnv = world->options_.groupEnv;
    group_ = job_->makeGroup(groupOptions(), init);
  } else {
    job_ = std::make_shared<Job>(rank, size, options_);
    group_ = job_->begin(store, groupOptions(), init);
    options_.mergeMembers = nullptr;
    options_.launcherKey.clear();  // groups that come from this one have other ranks
  }
  missingParts_ = std::make_unique<MissingParts>(*group_, options_.readsActiveRanks);
  completions_ = job_->completions();
  messages_ = std::make_shared<MessageDriver>(*group_, completions_,
                                              options_.lostMessagesReturn && !options_.raises);
  queue_ = std::make_shared<CollectiveQueue>(*group_, options_.raises, completions_, hooks_);
}

GroupOptions LiveGroup::groupOptions() const {
  return {.name = options_.groupName,
          .rank = rank_,
          .size = size_,
          .globalRanks = options_.globalRanks,
          .env = options_.groupEnv,
          .mailboxBytes = kMailboxBytes,
          .raises = options_.raises,
          .onView = [ranks = activeRanks_](const GroupView& view) { ranks->show(view); }};
}

std::unique_ptr<Group> LiveGroup::makeGroup(const std::string& purpose, size_t slotBytes,
                                            size_t mailboxBytes, bool raises, Deadline deadline,
                                            std::function<void(const GroupView&)> onView) const {
  refuseInForkedChild();
  if (!job_) throwError({ErrorCode::kAborted, kDestroyed});
  // createWithin() takes the global ranks for ranks of the job. In a job of its own, a group has
  // other ranks.
  GroupOptions options{.name = options_.groupName + "/" + purpose,
                       .rank = rank_,
                       .size = size_,
                       .globalRanks = isWithinWorld_ ? options_.globalRanks : std::vector<int>(),
                       .env = options_.groupEnv,
                       .slotBytes = slotBytes,
                       .mailboxBytes = mailboxBytes,
                       .raises = raises,
                       .onView = std::move(onView)};
  return job_->makeGroup(std::move(options), deadline);
}

void LiveGroup::refuseInForkedChild() const {
  if (!isForkedChild()) return;
  throwError({ErrorCode::kAborted, "group '" + options_.groupName +
                                       "' belongs to the process that this one was forked "
                                       "from (rank " +
                                       std::to_string(rank_) +
                                       "), and works there only. Make a group here, "
                                       "or do without one"});
}

int LiveGroup::jobRank(int rank) const {
  const bool isOfAJob = isWithinWorld_ && !options_.globalRanks.empty();
  return isOfAJob ? options_.globalRanks[rank] : rank;
}

bool LiveGroup::stop() {
  return order_.stop(Deadline::after(kToGetOut)) && queue_->stop(Deadline::after(kToGetOut)) &&
         messages_->stop();
}

void LiveGroup::drop() {
  order_.drop();
  queue_.reset();
  messages_.reset();
  missingParts_.reset();
  group_.reset();
  completions_.reset();
  job_.reset();
  options_.engine.reset();
}

void LiveGroup::leak() {
  order_.leak();
  leakOne(queue_);
  leakOne(messages_);
  leakOne(missingParts_);
  leakOne(group_);
  leakOne(completions_);
  leakOne(job_);
}

}  // namespace mooncake
