#include "backend/live_group.h"

#include <algorithm>
#include <thread>
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

constexpr std::chrono::milliseconds kLookAgain(1);

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
      room_(std::max(size, options.capacity)),
      options_(std::move(options)),
      isWithinWorld_(world != nullptr),
      activeRanks_(std::move(activeRanks)),
      events_(std::make_shared<SeriesEvents>(
          [ranks = activeRanks_](const GroupView& view, bool isLoss) {
            ranks->show(view, isLoss);
          })) {
  checkRanks(options_.globalRanks);
  const Deadline init = deadline();
  options_.capacity = room_;
  if (keepsLost()) activeRanks_->keepLost();
  if (world) {
    // A forked child makes no groups: it has no threads of the engine.
    world->refuseInForkedChild();
    job_ = world->job_;
    if (!job_) throwError({ErrorCode::kAborted, kDestroyed});
    options_.groupEnv = world->options_.groupEnv;
    world->settleMembers();
    if (options_.isNewcomer) {
      events_->begin(0);
      startLine(job_->makeAlone(events_->with(groupOptions(), 0), init));
    } else {
      startLine(job_->makeGroup(*world->group(), events_->with(groupOptions(), 1), init));
    }
  } else {
    job_ = std::make_shared<Job>(rank, size, options_);
    if (options_.mayBegin && options_.isNewcomer)
      options_.isNewcomer = job_->isRunning(store, init);
    if (options_.isNewcomer) {
      events_->begin(0);
      startLine(job_->join(store, events_->with(groupOptions(), 0), init));
    } else {
      startLine(job_->begin(store, events_->with(groupOptions(), 1), init));
    }
    options_.mergeMembers = nullptr;
    options_.launcherKey.clear();  // groups that come from this one have other ranks
  }
  options_.capacity = std::max(options_.capacity, room());
  missingParts_ = std::make_unique<MissingParts>(*line_, options_.readsActiveRanks);
  completions_ = job_->completions();
  messages_ = makeMessages(*group());
  queue_ = std::make_shared<CollectiveQueue>(*line_, options_.raises, completions_, hooks_,
                                             activeRanks_);
  throwIfError(line_->start());
}

std::shared_ptr<MessageDriver> LiveGroup::makeMessages(Group& group) const {
  return std::make_shared<MessageDriver>(group, completions_,
                                         options_.lostMessagesReturn && !options_.raises);
}

std::shared_ptr<MessageDriver> LiveGroup::messages() const {
  Lock lock(messagesMutex_);
  return messages_;
}

void LiveGroup::moveTo(Group& to, const std::vector<bool>& stays) {
  missingParts_->movedTo(to);
  if (stays[size_t(rank_)]) return messages()->messages().move(to, stays);
  // Alone, a rank has nobody to exchange messages with.
  const auto before = messages();
  auto messages = makeMessages(to);
  {
    Lock lock(messagesMutex_);
    messages_ = std::move(messages);
  }
  const Status usable = to.usable();  // not if this rank is taken out
  (void)before->stop(usable.ok() ? MessageDriver::destroyed() : usable.error());
}

GroupOptions LiveGroup::groupOptions() const {
  return {.name = options_.groupName,
          .rank = rank_,
          .size = room_,
          .extent = size_,
          .globalRanks = isWithinWorld_ ? firstJobRanks() : options_.globalRanks,
          .env = options_.groupEnv,
          .mailboxBytes = kMailboxBytes,
          .raises = options_.raises};
}

// The program does not tell which ranks of the job will come into a group within it.
std::vector<int> LiveGroup::firstJobRanks() const {
  std::vector<int> ranks;
  if (isWithinWorld_) ranks = options_.globalRanks;
  const int named = isWithinWorld_ ? size_ : room_;
  for (int r = int(ranks.size()); r < named; ++r) ranks.push_back(r);
  ranks.resize(size_t(room_), Roster::kNobody);
  return ranks;
}

void LiveGroup::startLine(std::unique_ptr<Group> first) {
  GroupOptions series = groupOptions();
  room_ = series.size = first->size();  // a newcomer's job may have more room than it asked for
  series.jobRanks = firstJobRanks();
  // Members do not know of all ranks that a newcomer names.
  lineName_ = job_->nameLine(options_.groupName, series.jobRanks[0], room_);
  line_ = std::make_unique<GroupLine>(
      job_->membership(), std::move(first), events_,
      GroupLine::Options{
          .group = std::move(series),
          .identity = lineName_,
          .isNewcomer = options_.isNewcomer,
          .keepsLost = options_.lostRanks == BackendOptions::LostRanks::kStayUntilDeactivated,
          .onDue = [this] { queue_->moveOn(); },
          .onMove = [this](Group& to, const std::vector<bool>& stays) { moveTo(to, stays); },
          .makeAlone =
              [job = job_.get(), init = options_.timeout](GroupOptions options) {
                return job->tryMakeAlone(std::move(options), Deadline::after(init));
              }});
}

std::unique_ptr<Group> LiveGroup::makeGroup(const std::string& purpose, size_t slotBytes,
                                            size_t pushBytes, bool raises, Deadline deadline,
                                            std::function<void(const GroupView&)> onView,
                                            int ranks) const {
  refuseInForkedChild();
  if (!job_) throwError({ErrorCode::kAborted, kDestroyed});
  // createWithin() takes the global ranks for ranks of the job. In a job of its own, a group has
  // other ranks.
  // Groups of one name are counted, and a process that comes later has made none of the earlier ones.
  settleMembers();
  uint32_t series;
  std::shared_ptr<Group> parent;
  do {
    series = line_->series();
    parent = group();
  } while (series != line_->series());
  const int size = ranks > 0 ? ranks : parent->extent();
  std::vector<int> globalRanks;
  for (int r = 0; isWithinWorld_ && r < size; ++r) globalRanks.push_back(jobRank(r));
  GroupOptions options{
      .name = options_.groupName + "/" + purpose + (series > 1 ? "@" + std::to_string(series) : ""),
      .rank = rank_,
      .size = size,
      .globalRanks = std::move(globalRanks),
      .env = options_.groupEnv,
      .slotBytes = slotBytes,
      .pushBytes = pushBytes,
      .raises = raises,
      .onView = std::move(onView)};
  return line_->isNewcomer() ? job_->makeAlone(std::move(options), deadline)
                             : job_->makeGroup(*parent, std::move(options), deadline);
}

void LiveGroup::settleMembers() const {
  const std::shared_ptr<Group> before = group();
  const Deadline deadline = Deadline::after(kToGetOut);
  // An operation that another thread runs has moved on, or is about to.
  while (before->renewal().hasEnded() && group() == before && !deadline.passed()) {
    if (queue_->tryMoveOn()) break;
    std::this_thread::sleep_for(kLookAgain);
  }
  if (line_->isRemoved() || line_->job() != job_->membership()) throwIfError(group()->usable());
}

void LiveGroup::showLosses() {
  if (options_.lostRanks != BackendOptions::LostRanks::kStayUntilSynced || line_->isRemoved())
    return;
  const auto group = this->group();
  GroupView now;
  for (int r = 0; r < group->size(); ++r) {
    if (group->agent().isActive(r)) now.active.push_back(r);
  }
  activeRanks_->show(now);
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
  if (!isWithinWorld_) return rank;
  return line_->jobRank(rank);
}

bool LiveGroup::stop() {
  const bool noReplays = order_.stop(Deadline::after(kToGetOut));
  const bool noCalls = queue_->stop(Deadline::after(kToGetOut));
  line_->stop();
  return noReplays && noCalls && messages()->stop();
}

void LiveGroup::drop() {
  order_.drop();
  queue_.reset();
  {
    Lock lock(messagesMutex_);
    messages_.reset();
  }
  missingParts_.reset();
  line_.reset();
  job_->freeLine(lineName_);
  completions_.reset();
  job_.reset();
  options_.engine.reset();
}

void LiveGroup::leak() {
  order_.leak();
  leakOne(queue_);
  {
    Lock lock(messagesMutex_);
    leakOne(messages_);
  }
  leakOne(missingParts_);
  leakOne(line_);
  leakOne(completions_);
  leakOne(job_);
}

}  // namespace mooncake
