#include "group/group_line.h"

#include <algorithm>

#include "base/log.h"
#include "base/thread.h"
#include "membership/topics.h"

namespace mooncake {
namespace {

// Time between two looks at the job's view and at deadlines.
constexpr auto kLook = std::chrono::milliseconds(5);
// Pauses before a message is sent again, which a broken connection may have lost.
constexpr Repetition::Limits kTellAgain{.first = std::chrono::milliseconds(50),
                                        .most = std::chrono::seconds(1)};
// Members that live come to make a successor in milliseconds.
constexpr auto kPrepares = std::chrono::seconds(20);
// One wait for the end of an old series, between two looks at stop().
constexpr auto kEnds = std::chrono::milliseconds(200);

}  // namespace

GroupLine::GroupLine(std::unique_ptr<Group> first, std::shared_ptr<SeriesEvents> events,
                     Options options)
    : options_(std::move(options)),
      events_(std::move(events)),
      current_(std::move(first)),
      series_(options_.isNewcomer ? 0 : 1),
      isIn_(!options_.isNewcomer) {}

Status GroupLine::start() {
  const auto topics = topicsOf(options_.identity);
  if (!topics.ok()) return topics.error();
  topic_ = topics->first;
  events_->watchEnd([this] {
    Lock lock(mutex_);
    post([this] { options_.onDue(); });
  });
  options_.job->engine().openTopic(
      topic_, [this](const EngineId& from, ByteView message) { onMessage(from, message); });
  return {};
}

GroupLine::~GroupLine() { stop(); }

void GroupLine::stop() {
  {
    Lock lock(mutex_);
    if (std::exchange(isStopped_, true)) return;
    changed_.notify_all();
  }
  events_->watchEnd(nullptr);
  if (topic_ != 0) options_.job->engine().closeTopic(topic_);
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Group> GroupLine::current() const {
  Lock lock(mutex_);
  return current_;
}

uint32_t GroupLine::series() const {
  Lock lock(mutex_);
  return series_;
}

bool GroupLine::isNewcomer() const {
  Lock lock(mutex_);
  return !isIn_;
}

bool GroupLine::isReady(int rank) const {
  Lock lock(mutex_);
  const auto newcomer = ready_.find(rank);
  return newcomer != ready_.end() && isLiving({rank, newcomer->second});
}

std::optional<int> GroupLine::rankOf(const EngineId& id) const {
  const std::vector<int>& jobRanks = options_.group.jobRanks;
  for (size_t r = 0; r < jobRanks.size(); ++r) {
    const auto peer = options_.job->peer(jobRanks[r]);
    if (peer && peer->id == id) return int(r);
  }
  return std::nullopt;
}

// Whether the newcomer is the one that holds its rank of the job.
bool GroupLine::isLiving(const Newcomer& newcomer) const {
  const int jobRank = options_.group.jobRanks[size_t(newcomer.rank)];
  if (!options_.job->view().active.contains(jobRank)) return false;
  if (newcomer.rank == options_.group.rank) return options_.job->engine().id() == newcomer.id;
  const auto peer = options_.job->peer(jobRank);
  return peer && peer->id == newcomer.id;
}

void GroupLine::tell(int rank, const LineMessage& message) const {
  const int jobRank = options_.group.jobRanks[size_t(rank)];
  const auto peer = options_.job->peer(jobRank);
  // A lost message is told again, or asked for.
  if (peer && options_.job->view().active.contains(jobRank))
    (void)options_.job->engine().send(*peer, topic_, encodeLineMessage(message));
}

void GroupLine::tellAll(const LineMessage& message) const {
  for (int r = 0; r < options_.group.size; ++r) {
    if (r != options_.group.rank) tell(r, message);
  }
}

Result<uint64_t> GroupLine::digestOf(const Successor& successor) const {
  const auto topics = topicsOf(successor.identity(options_.identity));
  if (!topics.ok()) return topics.error();
  return std::max<uint64_t>(topics->first, 1);
}

// On the loop's thread.
void GroupLine::onMessage(const EngineId& from, ByteView bytes) {
  const auto rank = rankOf(from);
  auto message = decodeLineMessage(bytes, options_.group.size);
  if (!rank || !message.ok()) return;
  const Successor& successor = message->successor;
  const bool isLast = lastMoveHas({*rank, from});
  switch (message->kind) {
    case LineMessage::Kind::kReady: {
      // It has missed our word.
      if (isLast) return tellLastMove(*rank);
      Lock lock(mutex_);
      if (isIn_) ready_[*rank] = from;
      changed_.notify_all();
      return;
    }
    case LineMessage::Kind::kPrepare: {
      if (isLast && isBehind(successor)) return tellLastMove(*rank);
      const auto digest = digestOf(successor);
      if (digest.ok()) prepare(successor, *digest, message->wishes);
      return;
    }
    case LineMessage::Kind::kMoved: {
      const auto digest = digestOf(successor);
      if (digest.ok()) noteMoved(*digest, *rank);
      return;
    }
  }
}

bool GroupLine::lastMoveHas(const Newcomer& newcomer) const {
  Lock lock(mutex_);
  return lastMove_ && std::ranges::count(lastMove_->newcomers, newcomer) > 0;
}

bool GroupLine::isNext(const Successor& successor) const {
  return isIn_ ? successor.series == series_ + 1
               : std::ranges::count(successor.newcomers,
                                    Newcomer{options_.group.rank, options_.job->engine().id()}) > 0;
}

bool GroupLine::isBehind(const Successor& successor) const {
  Lock lock(mutex_);
  return !isNext(successor);
}

void GroupLine::tellLastMove(int rank) const {
  Lock lock(mutex_);
  tell(rank, {.kind = LineMessage::Kind::kMoved, .successor = *lastMove_});
}

// Begins to make a successor, unless that is under way.
void GroupLine::prepare(const Successor& successor, uint64_t digest, bool isWished) {
  for (const Newcomer& newcomer : successor.newcomers) {
    if (!isLiving(newcomer)) return;  // the word comes again, if it is about to be
  }
  std::shared_ptr<Group> wished;
  {
    Lock lock(mutex_);
    // Made twice, the second one would take the messages of the first.
    if (isMoving_ || !isNext(successor)) return;
    auto known = preparations_.find(digest);
    if (known == preparations_.end()) {
      // A failure is for the caller that waits for it; here it must not take a place for ever.
      std::erase_if(preparations_, [](const auto& one) { return !one.second.failure.ok(); });
      if (preparations_.size() >= kMostSuccessors) return;
      known = preparations_.emplace(digest, Preparation{.successor = successor}).first;
      post([this, digest] { make(digest); });
    }
    Preparation& one = known->second;
    one.isWished = one.isWished || isWished;
    if (one.isWished && one.group && isIn_) wished = current_;
  }
  if (wished) wished->renewal().wishFor(digest);
}

// On the line's thread.
void GroupLine::make(uint64_t digest) {
  Successor successor;
  std::shared_ptr<Group> before;
  {
    Lock lock(mutex_);
    const auto one = preparations_.find(digest);
    if (one == preparations_.end()) return;
    successor = one->second.successor;
    before = current_;
  }
  const auto topics = topicsOf(successor.identity(options_.identity));
  if (!topics.ok()) return;  // the digest came from there
  GroupOptions options = events_->with(options_.group, successor.series);
  if (!isNewcomer()) options.bell = before->bell();  // a newcomer's is of another engine
  auto made =
      Group::createOn(options_.job, std::move(options), *topics, Deadline::after(kPrepares));
  bool isIn, isWished;
  {
    Lock lock(mutex_);
    const auto one = preparations_.find(digest);
    if (one == preparations_.end()) return;  // given up meanwhile
    if (made.ok()) {
      one->second.group = std::move(*made);
    } else {
      one->second.failure = made.error();
    }
    isIn = isIn_;
    isWished = one->second.isWished;
    changed_.notify_all();
  }
  if (!made.ok()) {
    log(LogLevel::kWarning, options_.job->engine().logName(), "group '", options_.group.name,
        "' goes on without newcomers: ", made.error().message);
    return;
  }
  if (!isIn) return checkTold(digest);
  // kExhausted cannot be: we make no more than it takes. kMoved: the move makes it void.
  (void)before->renewal().readyFor(digest);
  if (isWished) before->renewal().wishFor(digest);
}

void GroupLine::noteMoved(uint64_t digest, int rank) {
  {
    Lock lock(mutex_);
    const auto one = preparations_.find(digest);
    if (isIn_ || one == preparations_.end()) return;
    one->second.movedTo.insert(rank);
  }
  checkTold(digest);
}

// Newcomers: moves once all members that live have said that they did. A member that has said so may
// have died before any other has moved.
void GroupLine::checkTold(uint64_t digest) {
  Lock lock(mutex_);
  const auto found = preparations_.find(digest);
  if (isIn_ || due_ || found == preparations_.end() || !found->second.group) return;
  const Preparation& one = found->second;
  if (one.movedTo.empty()) return;
  const View view = options_.job->view();
  for (int r = 0; r < options_.group.size; ++r) {
    const bool isNewcomer = std::ranges::any_of(one.successor.newcomers,
                                                [&](const Newcomer& n) { return n.rank == r; });
    if (!isNewcomer && view.active.contains(options_.group.jobRanks[size_t(r)]) &&
        !one.movedTo.contains(r))
      return;
  }
  due_ = digest;
  post([this] { options_.onDue(); });
}

std::vector<Newcomer> GroupLine::newcomersFor(const std::vector<int>& ranks,
                                              std::vector<int>& missing) const {
  std::vector<Newcomer> newcomers;
  for (const int r : ranks) {
    const auto ready = ready_.find(r);
    if (ready != ready_.end() && isLiving({r, ready->second})) {
      newcomers.push_back({r, ready->second});
    } else {
      missing.push_back(r);
    }
  }
  return newcomers;
}

Result<std::vector<int>> GroupLine::recover(std::vector<int> ranks, Deadline ready,
                                            Deadline deadline) {
  std::ranges::sort(ranks);
  std::vector<int> dropped;
  Successor asked;
  uint64_t digest = 0;
  std::optional<Repetition> asking;
  for (;;) {
    const auto group = current();
    MOONCAKE_TRY(group->usable());
    std::erase_if(ranks, [&](int r) { return group->agent().isActive(r); });
    // A newcomer that was asked for and is lost again.
    for (const Newcomer& newcomer : asked.newcomers) {
      if (isLiving(newcomer) || std::erase(ranks, newcomer.rank) == 0) continue;
      dropped.push_back(newcomer.rank);
    }
    if (ranks.empty()) return dropped;
    std::vector<int> missing;
    Successor next;
    {
      Lock lock(mutex_);
      if (isStopped_) return Error{ErrorCode::kAborted, "the process group was destroyed"};
      if (isMoving_ || current_ != group) continue;
      next = {.series = series_ + 1, .newcomers = newcomersFor(ranks, missing)};
    }
    if (!missing.empty()) {
      if (ready.passed()) return notReady(*group, missing);
    } else {
      if (next != asked) {
        const auto named = digestOf(next);
        if (!named.ok()) return named.error();
        asked = next;
        digest = *named;
        asking.emplace(kTellAgain, Clock::now());
        tellAll({.kind = LineMessage::Kind::kPrepare, .successor = asked});
      } else if (asking->takeDue(Clock::now())) {
        tellAll({.kind = LineMessage::Kind::kPrepare, .successor = asked});
      }
      prepare(asked, digest, /*isWished=*/true);
      if (const Status failed = failureOf(digest); !failed.ok()) {
        (void)withdraw(*group, digest);
        return failed.error();
      }
      if (deadline.passed()) {
        const auto end = group->renewal().awaitEnd(Deadline::after(Clock::duration::zero()));
        const Status withdrawn = withdraw(*group, digest);
        if (withdrawn.code() != ErrorCode::kMoved) return notMoved(*group, asked, end.status());
      }
    }
    Lock lock(mutex_);
    changed_.wait_until(mutex_, Deadline::after(kLook).when());
  }
}

Status GroupLine::failureOf(uint64_t digest) const {
  Lock lock(mutex_);
  const auto one = preparations_.find(digest);
  return one == preparations_.end() ? Status() : one->second.failure;
}

// Ok, or kTimeout: the line does not move to that successor. kMoved: it has.
Status GroupLine::withdraw(Group& group, uint64_t digest) {
  const Status status = group.renewal().notReadyFor(digest, Deadline::after(kPrepares));
  if (status.code() == ErrorCode::kMoved) return status;
  Lock lock(mutex_);
  if (const auto one = preparations_.find(digest); one != preparations_.end()) {
    post([group = std::move(one->second.group)] {});
    preparations_.erase(one);
  }
  return status;
}

Error GroupLine::notReady(const Group& group, const std::vector<int>& missing) const {
  return {ErrorCode::kTimeout,
          group.nameRank(group.rank()) + ": no process is ready to take the place of " +
              group.nameRanks(missing) + " in group '" + group.name() +
              "': start one with MOONCAKE_REJOIN=1 or is_extension=True, which calls "
              "join_group, and ask get_peer_state before"};
}

Error GroupLine::notMoved(const Group& group, const Successor& successor, const Status& why) const {
  std::vector<int> newcomers;
  for (const Newcomer& newcomer : successor.newcomers) newcomers.push_back(newcomer.rank);
  return {ErrorCode::kTimeout,
          group.nameRank(group.rank()) + ": group '" + group.name() + "' has not let " +
              group.nameRanks(newcomers) +
              " in before the timeout: a member is in a call that the others do not call, or is "
              "stopped. Nothing has changed" +
              (why.ok() ? "" : " (" + why.error().message + ")")};
}

Status GroupLine::join(Deadline deadline) {
  std::optional<Repetition> asking;
  for (;;) {
    MOONCAKE_TRY(options_.job->standing());
    std::vector<Successor> toldBySome;
    std::vector<uint64_t> digests;
    {
      Lock lock(mutex_);
      if (isIn_) return {};
      if (isStopped_) return {ErrorCode::kAborted, "the process group was destroyed"};
      for (const auto& [digest, one] : preparations_) {
        digests.push_back(digest);
        if (!one.movedTo.empty()) toldBySome.push_back(one.successor);
      }
    }
    if (deadline.passed()) {
      return {ErrorCode::kTimeout, "rank " + std::to_string(options_.group.rank) +
                                       " was not let into group '" + options_.group.name +
                                       "': no member has called recover_ranks for it in time"};
    }
    for (const uint64_t digest : digests) checkTold(digest);  // a member may be lost since
    if (!asking || asking->takeDue(Clock::now())) {
      if (!asking) asking.emplace(kTellAgain, Clock::now());
      tellAll({.kind = LineMessage::Kind::kReady});
      for (const Successor& successor : toldBySome)
        tellAll({.kind = LineMessage::Kind::kPrepare, .wishes = true, .successor = successor});
    }
    Lock lock(mutex_);
    changed_.wait_until(mutex_, Deadline::after(kLook).when());
  }
}

std::shared_ptr<Group> GroupLine::moveOn() {
  const auto from = current();
  uint64_t digest;
  {
    Lock lock(mutex_);
    digest = due_.value_or(0);
  }
  if (digest == 0) {
    if (!from->renewal().hasEnded()) return from;
    digest = from->renewal().close()->successor;
  }
  std::shared_ptr<Group> to;
  Successor successor;
  {
    Lock lock(mutex_);
    const auto one = preparations_.find(digest);
    if (one == preparations_.end() || !one->second.group) return from;  // only if given up: stop()
    to = one->second.group;
    successor = one->second.successor;
    isMoving_ = true;
    // What else was made is for this series: no other one will have it.
    post([others = std::exchange(preparations_, {})] {});
    due_.reset();
  }
  std::vector<bool> stays(size_t(options_.group.size), !isNewcomer());
  for (const Newcomer& newcomer : successor.newcomers) stays[size_t(newcomer.rank)] = false;
  options_.onMove(*to, stays);
  events_->begin(successor.series);  // before a caller of recover() or join() goes on
  {
    Lock lock(mutex_);
    current_ = to;
    isMoving_ = false;
    series_ = successor.series;
    isIn_ = true;
    lastMove_ = successor;
    for (const Newcomer& newcomer : successor.newcomers) ready_.erase(newcomer.rank);
    post([this, from] { end(from); });
    changed_.notify_all();
  }
  for (const Newcomer& newcomer : successor.newcomers)
    tell(newcomer.rank, {.kind = LineMessage::Kind::kMoved, .successor = successor});
  return to;
}

// On the line's thread. The others may need the old series until they have ended it, too.
void GroupLine::end(const std::shared_ptr<Group>& old) {
  while (old->renewal().hasEnded() && !old->renewal().leave(Deadline::after(kEnds)).ok()) {
    Lock lock(mutex_);
    if (isStopped_) return;
  }
}

bool GroupLine::settle(Deadline deadline) {
  Lock lock(mutex_);
  while (isBusy_ || !tasks_.empty()) {
    if (deadline.passed()) return false;
    changed_.wait_until(mutex_, deadline.earlier(Deadline::after(kLook)).when());
  }
  return true;
}

void GroupLine::post(std::function<void()> task) {
  if (isStopped_) return;
  tasks_.push_back(std::move(task));
  changed_.notify_all();
  if (thread_.joinable()) return;
  auto thread = startThread("mooncake-join", [this] { run(); });
  if (thread.ok()) {
    thread_ = std::move(*thread);
  } else {
    log(LogLevel::kWarning, options_.job->engine().logName(), "group '", options_.group.name,
        "' cannot take newcomers in: ", thread.error().message);
  }
}

void GroupLine::run() {
  mutex_.lock();
  while (!isStopped_) {
    if (tasks_.empty()) {
      changed_.wait(mutex_);
      continue;
    }
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    isBusy_ = true;
    mutex_.unlock();
    task();
    task = nullptr;  // the last reference to a group may go with it
    mutex_.lock();
    isBusy_ = false;
    changed_.notify_all();
  }
  mutex_.unlock();
}

}  // namespace mooncake
