#include "group/group_line.h"

#include <algorithm>

#include "base/failpoint.h"
#include "base/log.h"
#include "base/thread.h"
#include "group/recover_facts.h"
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
// One wait for the end of an old series or of a flush, between two looks at stop().
constexpr auto kEnds = std::chrono::milliseconds(200);
// Successors that a newcomer makes at most: it cannot know which of them is given up.
constexpr size_t kMostOfNewcomers = 8;
// Digests of given up successors that are kept.
constexpr size_t kMostGivenUp = 64;

}  // namespace

GroupLine::GroupLine(std::unique_ptr<Group> first, std::shared_ptr<SeriesEvents> events,
                     Options options)
    : options_(std::move(options)),
      events_(std::move(events)),
      members_(options_.job, options_.identity, options_.group.rank, options_.group.jobRanks),
      current_(std::move(first)),
      series_(options_.isNewcomer ? 0 : 1),
      isIn_(!options_.isNewcomer) {}

Status GroupLine::start() {
  const auto topics = topicsOf(options_.identity);
  if (!topics.ok()) return topics.error();
  members_.useTopic(topics->first);
  events_->watchEnd([this] {
    Lock lock(mutex_);
    post([this] { options_.onDue(); });
  });
  options_.job->engine().openTopic(
      members_.topic(),
      [this](const EngineId& from, ByteView message) { onMessage(from, message); });
  return {};
}

GroupLine::~GroupLine() { stop(); }

void GroupLine::stop() {
  {
    Lock lock(mutex_);
    if (std::exchange(isStopped_, true)) return;
    changed_.notify_all();
  }
  Preparations left;
  {
    Lock lock(mutex_);
    left.swap(preparations_);
  }
  left.clear();
  events_->watchEnd(nullptr);
  if (members_.topic() != 0) options_.job->engine().closeTopic(members_.topic());
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
  return newcomer != ready_.end() && members_.isLiving({rank, newcomer->second});
}

// On the loop's thread.
void GroupLine::onMessage(const EngineId& from, ByteView bytes) {
  const auto rank = members_.rankOf(from);
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
    case LineMessage::Kind::kAsk:
      return propose(successor.newcomers);
    case LineMessage::Kind::kPrepare: {
      if (isLast && isBehind(successor)) return tellLastMove(*rank);
      const auto digest = members_.digestOf(successor);
      if (!digest.ok()) return;
      prepare(successor, *digest);
      if (message->wishes) wishFor(*digest);
      return;
    }
    case LineMessage::Kind::kGaveUp: {
      const auto digest = members_.digestOf(successor);
      if (digest.ok()) noteGivenUp(*digest);
      return;
    }
    case LineMessage::Kind::kMoved: {
      const auto digest = members_.digestOf(successor);
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
  members_.tell(rank, {.kind = LineMessage::Kind::kMoved, .successor = *lastMove_});
}

// A newcomer cannot know: members may move to it without the rank that has given it up or proposed
// it, once that one is lost.
bool GroupLine::isVoid(const Preparation& one, const std::vector<bool>& active) const {
  if (!isIn_) return false;
  if (one.isGivenUp || !one.failure.ok()) return true;
  const int proposer = one.successor.proposer;
  return (proposer != options_.group.rank && !active[size_t(proposer)]) ||
         !std::ranges::all_of(one.successor.newcomers, [&](const Newcomer& newcomer) {
           return members_.isLiving(newcomer);
         });
}

// The successor that this rank wishes for if it wishes for one: the lowest proposer's.
GroupLine::Preparations::iterator GroupLine::living(const std::vector<bool>& active) {
  auto best = preparations_.end();
  for (auto one = preparations_.begin(); one != preparations_.end(); ++one) {
    if (isVoid(one->second, active)) continue;
    if (best == preparations_.end() ||
        one->second.successor.proposer < best->second.successor.proposer)
      best = one;
  }
  return best;
}

// One member proposes, one successor at a time: so there are no two that keep each other from being
// made.
void GroupLine::propose(const std::vector<Newcomer>& newcomers) {
  const auto group = current();
  if (isNewcomer() || proposerOf(*group) != options_.group.rank) return;
  const std::vector<bool> active = activeOf(*group);
  for (const Newcomer& newcomer : newcomers) {
    if (!members_.isLiving(newcomer)) return;
    if (active[size_t(newcomer.rank)]) return;  // it is in: the member that asks is behind
  }
  LineMessage word{.kind = LineMessage::Kind::kPrepare};
  {
    Lock lock(mutex_);
    if (isMoving_ || current_ != group || newcomers.empty()) return;
    const auto one = living(active);
    if (one != preparations_.end()) {
      auto& telling = one->second.telling;
      if (telling && !telling->takeDue(Clock::now())) return;
      word.successor = one->second.successor;
    } else {
      word.successor = {.series = series_ + 1,
                        .proposer = options_.group.rank,
                        .number = ++proposals_,
                        .term = options_.job->roster()->term.number,
                        .newcomers = newcomers};
      for (int r = 0; r < options_.group.size; ++r) {
        if (!active[size_t(r)] &&
            std::ranges::find(newcomers, r, &Newcomer::rank) == newcomers.end())
          word.successor.absent.push_back(r);
      }
    }
  }
  const auto digest = members_.digestOf(word.successor);
  if (!digest.ok()) return;
  prepare(word.successor, *digest);
  {
    Lock lock(mutex_);
    const auto one = preparations_.find(*digest);
    if (one == preparations_.end()) return;  // there is no room for it yet
    if (!one->second.telling) one->second.telling.emplace(kTellAgain, Clock::now());
  }
  members_.tellAll(word);
  failpoint("prepare");
}

// Begins to make a successor, unless that is under way.
void GroupLine::prepare(const Successor& successor, uint64_t digest) {
  for (const Newcomer& newcomer : successor.newcomers) {
    if (!members_.isLiving(newcomer)) return;  // the word comes again, if it is about to be
  }
  const std::vector<bool> active = activeOf(*current());
  Lock lock(mutex_);
  if (isStopped_ || isMoving_ || !isNext(successor) || givenUp_.contains(digest) ||
      preparations_.contains(digest))
    return;
  const bool hasVoid = std::ranges::any_of(preparations_, [&](const auto& one) {
    mutex_.assertHeld();
    return isVoid(one.second, active);
  });
  if (hasVoid) post([this] { dropVoid(); });
  if (preparations_.size() >= (isIn_ ? kMostSuccessors : kMostOfNewcomers)) return;
  auto maker =
      SuccessorMaker::start([this, digest](const StopSignal& stop) { make(digest, stop); });
  if (!maker.ok()) {
    log(LogLevel::kWarning, options_.job->engine().logName(), "group '", options_.group.name,
        "' cannot take newcomers in: ", maker.error().message);
    return;
  }
  preparations_.emplace(digest, Preparation{.successor = successor, .maker = std::move(*maker)});
}

// On a thread of its own.
void GroupLine::make(uint64_t digest, const StopSignal& stop) {
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
  auto made = Group::createOn(options_.job, std::move(options), *topics,
                              members_.rosterOf(successor), Deadline::after(kPrepares), &stop);
  failpoint("successor-made");
  bool isIn;
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
    changed_.notify_all();
  }
  if (made.status().code() == ErrorCode::kInterrupted) return;  // given up
  if (!made.ok()) {
    log(LogLevel::kWarning, options_.job->engine().logName(), "group '", options_.group.name,
        "' goes on without newcomers: ", made.error().message);
    return members_.tellAll({.kind = LineMessage::Kind::kGaveUp, .successor = successor});
  }
  if (!isIn) return checkTold(digest);
  readyFor(*before, digest);
}

void GroupLine::readyFor(Group& before, uint64_t digest) {
  {
    Lock ordered(readiness_);
    {
      Lock lock(mutex_);
      const auto one = preparations_.find(digest);
      if (one == preparations_.end() || one->second.isGivenUp) return;
    }
    // kExhausted cannot be: we make no more than it takes. kMoved: the move makes it void.
    (void)before.renewal().readyFor(digest);
  }
  failpoint("successor-ready");
  bool isWished;
  {
    Lock lock(mutex_);
    const auto one = preparations_.find(digest);
    isWished = one != preparations_.end() && one->second.isWished;
  }
  if (!isWished) return;
  before.renewal().wishFor(digest);
  failpoint("wished");
}

// Members: this rank moves to it once it is made.
void GroupLine::wishFor(uint64_t digest) {
  std::shared_ptr<Group> wished;
  {
    Lock lock(mutex_);
    const auto one = preparations_.find(digest);
    if (!isIn_ || one == preparations_.end()) return;
    one->second.isWished = true;
    if (one->second.group) wished = current_;
  }
  if (wished) wished->renewal().wishFor(digest);
}

// Returns its digest; 0: there is none yet. `before`: of the last wish.
uint64_t GroupLine::wishForLiving(const Group& group, uint64_t before) {
  const std::vector<bool> active = activeOf(group);
  uint64_t digest;
  bool isWished, isMade;
  {
    Lock lock(mutex_);
    if (current_.get() != &group) return before;
    const auto one = living(active);
    if (one == preparations_.end()) return 0;
    digest = one->first;
    isWished = digest == before && one->second.isWished;
    isMade = one->second.group != nullptr;
  }
  // A newcomer's wish for a successor that is void here may have taken the place of ours.
  if (isWished && (!isMade || group.agent().state().wish == digest)) return digest;
  wishFor(digest);
  return digest;
}

// Ok: the line does not move to that successor, and it is not made any more. kMoved: it has moved.
// kTimeout: a flush may still decide it.
Status GroupLine::giveUp(Group& group, uint64_t digest) {
  LineMessage word{.kind = LineMessage::Kind::kGaveUp};
  {
    Lock ordered(readiness_);
    Lock lock(mutex_);
    const auto one = preparations_.find(digest);
    if (one == preparations_.end()) return {};
    one->second.isGivenUp = true;
    word.successor = one->second.successor;
  }
  MOONCAKE_TRY(group.renewal().notReadyFor(digest, Deadline::after(kEnds)));
  {
    Lock lock(mutex_);
    const auto one = preparations_.find(digest);
    if (one == preparations_.end()) return {};
    if (!one->second.failure.ok()) lastFailure_ = {digest, one->second.failure};
    post([gone = one->second] {});  // its memory, and its thread, end there
    preparations_.erase(one);
    givenUp_.insert(digest);
  }
  members_.tellAll(word);
  return {};
}

void GroupLine::noteGivenUp(uint64_t digest) {
  Lock lock(mutex_);
  if (!isIn_) return;
  const auto one = preparations_.find(digest);
  if (one == preparations_.end()) {
    if (givenUp_.size() < kMostGivenUp) givenUp_.insert(digest);
    return;
  }
  one->second.isGivenUp = true;
  post([this] { dropVoid(); });
}

// On the line's thread. While a flush is under way, it is tried again with the next proposal.
void GroupLine::dropVoid() {
  const auto group = current();
  const std::vector<bool> active = activeOf(*group);
  std::vector<uint64_t> digests;
  {
    Lock lock(mutex_);
    if (current_ != group || isMoving_) return;
    for (const auto& [digest, one] : preparations_) {
      if (isVoid(one, active)) digests.push_back(digest);
    }
  }
  for (const uint64_t digest : digests) (void)giveUp(*group, digest);
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
  const View view = options_.job->viewOf(*members_.rosterOf(one.successor));
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
    if (ready != ready_.end() && members_.isLiving({r, ready->second})) {
      newcomers.push_back({r, ready->second});
    } else {
      missing.push_back(r);
    }
  }
  return newcomers;
}

Result<std::vector<int>> GroupLine::recover(std::vector<int> ranks, Deadline ready,
                                            Deadline deadline, Unready unready) {
  std::ranges::sort(ranks);
  std::vector<int> dropped;
  std::vector<Newcomer> asked;  // all that were wanted so far
  uint64_t wished = 0;
  int proposer = -1;
  std::optional<Repetition> asking;
  for (;;) {
    const auto group = current();
    MOONCAKE_TRY(group->usable());
    std::erase_if(ranks, [&](int r) { return group->agent().isActive(r); });
    const bool isUndecided = dropLost(*group, asked, ranks, dropped);
    if (ranks.empty()) return dropped;
    if (waitsForCaller(*group))
      return withoutNewcomers(*group, std::move(ranks), std::move(dropped));
    std::vector<int> missing;
    std::vector<Newcomer> wanted;
    {
      Lock lock(mutex_);
      if (isStopped_) return Error{ErrorCode::kAborted, "the process group was destroyed"};
      if (isMoving_ || current_ != group) continue;
      wanted = newcomersFor(ranks, missing);
    }
    for (const Newcomer& newcomer : wanted) {
      if (std::ranges::count(asked, newcomer) == 0) asked.push_back(newcomer);
    }
    if (!missing.empty()) {
      const bool isLate = isUndecided ? deadline.passed() : ready.passed();
      if (isLate && unready == Unready::kIsError) return notReady(*group, missing);
      for (const int rank : missing) {
        if (!isLate) continue;
        std::erase(ranks, rank);
        dropped.push_back(rank);
      }
    } else {
      if (const int now = proposerOf(*group); now != proposer) {
        proposer = now;
        asking.reset();
      }
      if (!asking || asking->takeDue(Clock::now())) {
        if (!asking) asking.emplace(kTellAgain, Clock::now());
        if (proposer != options_.group.rank)
          members_.tell(proposer,
                        {.kind = LineMessage::Kind::kAsk, .successor = {.newcomers = wanted}});
      }
      if (proposer == options_.group.rank) propose(wanted);
      const Status failed = failureOf(wished);
      wished = wishForLiving(*group, wished);
      if (!failed.ok()) return failed.error();
      if (deadline.passed()) {
        const auto end = group->renewal().awaitEnd(Deadline::after(Clock::duration::zero()));
        if (giveUp(*group, wished).code() != ErrorCode::kMoved)
          return notMoved(*group, wanted, end.status());
      }
    }
    Lock lock(mutex_);
    changed_.wait_until(mutex_, Deadline::after(kLook).when());
  }
}

// Takes the ranks of lost newcomers out of `ranks`. Into `dropped`, unless the line has moved with them:
// that holds for members that look later, too. Returns whether a flush may still decide that it does.
bool GroupLine::dropLost(const Group& group, const std::vector<Newcomer>& asked,
                         std::vector<int>& ranks, std::vector<int>& dropped) {
  bool isUndecided = false;
  for (const Newcomer& newcomer : asked) {
    if (std::ranges::count(ranks, newcomer.rank) == 0) continue;
    const bool isIn = lastMoveHas(newcomer);
    if (!isIn && members_.isLiving(newcomer)) continue;
    if (!isIn && !isGivenUp(group, newcomer)) {
      isUndecided = true;
      continue;
    }
    std::erase(ranks, newcomer.rank);
    if (!isIn) dropped.push_back(newcomer.rank);
  }
  return isUndecided;
}

// A newcomer was lost. True: the line does not move to a successor with it any more, so all members
// that asked for it drop it. False: it has moved, or a flush may still decide that it does.
bool GroupLine::isGivenUp(const Group& group, const Newcomer& newcomer) {
  dropVoid();
  Lock lock(mutex_);
  return current_.get() == &group && !group.renewal().close() &&
         std::ranges::none_of(preparations_, [&](const auto& one) {
           return std::ranges::count(one.second.successor.newcomers, newcomer) > 0;
         });
}

// Adds to `dropped` the ranks that are not in the successor for which a close is decided.
std::vector<int> GroupLine::withoutNewcomers(const Group& group, std::vector<int> ranks,
                                             std::vector<int> dropped) const {
  const auto close = group.renewal().close();
  Lock lock(mutex_);
  const auto next = preparations_.find(close->successor);
  for (const int rank : ranks) {
    if (next == preparations_.end() ||
        std::ranges::none_of(next->second.successor.newcomers,
                             [&](const Newcomer& newcomer) { return newcomer.rank == rank; }))
      dropped.push_back(rank);
  }
  std::ranges::sort(dropped);
  return dropped;
}

Status GroupLine::failureOf(uint64_t digest) const {
  Lock lock(mutex_);
  const auto one = preparations_.find(digest);
  if (one != preparations_.end()) return one->second.failure;
  return lastFailure_.first == digest ? lastFailure_.second : Status();
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
      members_.tellAll({.kind = LineMessage::Kind::kReady});
      failpoint("ready");
      for (const Successor& successor : toldBySome)
        members_.tellAll(
            {.kind = LineMessage::Kind::kPrepare, .wishes = true, .successor = successor});
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
    givenUp_.clear();
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
  failpoint("renewed");
  for (const Newcomer& newcomer : successor.newcomers)
    members_.tell(newcomer.rank, {.kind = LineMessage::Kind::kMoved, .successor = successor});
  return to;
}

// On the line's thread. The others may need the old series until they have ended it, too.
void GroupLine::end(const std::shared_ptr<Group>& old) {
  while (old->renewal().hasEnded()) {
    const Status left = old->renewal().leave(Deadline::after(kEnds));
    if (left.code() != ErrorCode::kTimeout) break;  // ok, or this rank is out
    Lock lock(mutex_);
    if (isStopped_) return;
  }
  failpoint("old-retired");
}

bool GroupLine::settle(Deadline deadline) {
  Lock lock(mutex_);
  const auto isMade = [](const auto& one) { return one.second.group || !one.second.failure.ok(); };
  while (isBusy_ || !tasks_.empty() || !std::ranges::all_of(preparations_, isMade)) {
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
