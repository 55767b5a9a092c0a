#include "group/group_line.h"

#include <algorithm>

#include "base/failpoint.h"
#include "base/log.h"
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

}  // namespace

GroupLine::GroupLine(std::shared_ptr<Membership> job, std::unique_ptr<Group> first,
                     std::shared_ptr<SeriesEvents> events, Options options)
    : options_(std::move(options)),
      events_(std::move(events)),
      members_(std::move(job), options_.identity, options_.group.rank, options_.group.jobRanks),
      current_(std::move(first)),
      extent_(current_->extent()),
      series_(options_.isNewcomer ? 0 : 1),
      isIn_(!options_.isNewcomer),
      ready_(members_),
      successors_(members_, options_.group.rank) {}

Status GroupLine::start() {
  const auto topics = topicsOf(options_.identity);
  if (!topics.ok()) return topics.error();
  members_.useTopic(topics->first);
  events_->watchEnd([this] {
    Lock lock(mutex_);
    post([this] { options_.onDue(); });
  });
  listen();
  return {};
}

void GroupLine::listen() {
  members_.job()->engine().openTopic(
      members_.topic(),
      [this](const EngineId& from, ByteView message) { onMessage(from, message); });
}

GroupLine::~GroupLine() { stop(); }

void GroupLine::stop() {
  {
    Lock lock(mutex_);
    if (std::exchange(isStopped_, true)) return;
    changed_.notify_all();
  }
  SuccessorTable::Entries left;
  {
    Lock lock(mutex_);
    left = successors_.takeAll();
  }
  left.clear();
  events_->watchEnd(nullptr);
  if (members_.topic() != 0) members_.job()->engine().closeTopic(members_.topic());
  tasks_.stop();
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

bool GroupLine::isRemoved() const {
  Lock lock(mutex_);
  return isRemoved_;
}

uint64_t GroupLine::readyKey(int rank) const {
  Lock lock(mutex_);
  return ready_.keyOf(rank);
}

// On the loop's thread.
void GroupLine::onMessage(const EngineId& from, ByteView bytes) {
  auto message = decodeLineMessage(bytes, options_.group.size);
  if (!message.ok()) return;
  const Successor& successor = message->successor;
  const auto rank = message->kind == LineMessage::Kind::kReady
                        ? members_.rankOfReady(from, successor.jobRanks)
                        : members_.rankOf(from);
  if (!rank) return;
  const auto digest = members_.digestOf(successor);
  if (!digest.ok()) return;
  const bool isLast = lastMoveHas({*rank, from});
  switch (message->kind) {
    case LineMessage::Kind::kReady: {
      // It has missed our word.
      if (isLast) return tellLastMove(*rank);
      Lock lock(mutex_);
      if (isIn_) ready_.note({*rank, from});
      changed_.notify_all();
      return;
    }
    case LineMessage::Kind::kAsk:
      return propose(successor);
    case LineMessage::Kind::kPrepare:
      if (isLast && isBehind(successor)) return tellLastMove(*rank);
      prepare(successor, *digest);
      if (message->wishes) wishFor(*digest);
      return;
    case LineMessage::Kind::kGaveUp:
      return noteGivenUp(*digest);
    case LineMessage::Kind::kMoved:
      return noteMoved(*digest, *rank);
  }
}

bool GroupLine::lastMoveHas(const Newcomer& newcomer) const {
  Lock lock(mutex_);
  return lastMove_ && std::ranges::count(lastMove_->newcomers, newcomer) > 0;
}

bool GroupLine::isNext(const Successor& successor) const {
  return isIn_ ? successor.series == series_ + 1
               : isJoining_ && std::ranges::count(successor.newcomers,
                                                  Newcomer{options_.group.rank,
                                                           members_.job()->engine().id()}) > 0;
}

bool GroupLine::isBehind(const Successor& successor) const {
  Lock lock(mutex_);
  return !isNext(successor);
}

void GroupLine::tellLastMove(int rank) const {
  Lock lock(mutex_);
  members_.tell(rank, {.kind = LineMessage::Kind::kMoved, .successor = *lastMove_});
}

// One member proposes, one successor at a time: so there are no two that keep each other from being
// made. Of `wanted`: the newcomers, and the members to be taken out as `absent`.
void GroupLine::propose(const Successor& wanted) {
  const auto group = current();
  if (isNewcomer() || proposerOf(*group) != options_.group.rank) return;
  const std::vector<bool> active = activeOf(*group);
  if (!members_.areLiving(wanted.newcomers) ||
      !isChange(active, membersOf(*group, members_, options_.keepsLost), wanted))
    return;
  LineMessage word{.kind = LineMessage::Kind::kPrepare};
  {
    Lock lock(mutex_);
    if (isMoving_ || current_ != group) return;
    if (const auto* one = successors_.living(active)) {
      auto& telling = successors_.find(one->first)->telling;
      if (telling && !telling->takeDue(Clock::now())) return;
      word.successor = one->second.successor;
    } else {
      word.successor = {.series = series_ + 1,
                        .proposer = options_.group.rank,
                        .number = ++proposals_,
                        .term = members_.job()->roster()->term.number,
                        .newcomers = wanted.newcomers,
                        .jobRanks = members_.jobRanksWith(wanted.newcomers)};
      setAbsent(active, wanted.absent, word.successor);
      setExtent(*group, retired_, word.successor);
    }
  }
  const auto digest = members_.digestOf(word.successor);
  if (!digest.ok()) return;
  prepare(word.successor, *digest);
  {
    Lock lock(mutex_);
    Preparation* const one = successors_.find(*digest);
    if (!one) return;  // there is no room for it yet
    if (!one->telling) one->telling.emplace(kTellAgain, Clock::now());
  }
  members_.tellAll(word);
  failpoint("prepare");
}

// Begins to make a successor, unless that is under way.
void GroupLine::prepare(const Successor& successor, uint64_t digest) {
  // The word comes again, if one is about to be.
  if (!members_.areLiving(successor.newcomers)) return;
  const std::vector<bool> active = activeOf(*current());
  Lock lock(mutex_);
  if (isStopped_ || isMoving_ || !isNext(successor) || !successors_.mayAdd(digest)) return;
  if (isIn_ && !successors_.voids(active).empty()) post([this] { dropVoid(); });
  if (successors_.entries().size() >= (isIn_ ? kMostSuccessors : kMostOfNewcomers)) return;
  auto maker =
      SuccessorMaker::start([this, digest](const StopSignal& stop) { make(digest, stop); });
  if (!maker.ok()) {
    log(LogLevel::kWarning, members_.job()->engine().logName(), "group '", options_.group.name,
        "' cannot take newcomers in: ", maker.error().message);
    return;
  }
  successors_.add(digest, {.successor = successor, .maker = std::move(*maker)});
}

// On a thread of its own.
void GroupLine::make(uint64_t digest, const StopSignal& stop) {
  Successor successor;
  std::shared_ptr<Group> before;
  {
    Lock lock(mutex_);
    const Preparation* const one = successors_.find(digest);
    if (!one) return;
    successor = one->successor;
    before = current_;
  }
  auto made = makeGroup(successor, *before, stop);
  failpoint("successor-made");
  bool isIn;
  {
    Lock lock(mutex_);
    Preparation* const one = successors_.find(digest);
    if (!one) return;  // given up meanwhile
    if (made.ok()) {
      one->group = std::move(*made);
    } else {
      one->failure = made.error();
    }
    isIn = isIn_;
    changed_.notify_all();
  }
  if (made.status().code() == ErrorCode::kInterrupted) return;  // given up
  if (!made.ok()) {
    log(LogLevel::kWarning, members_.job()->engine().logName(), "group '", options_.group.name,
        "' goes on without newcomers: ", made.error().message);
    return members_.tellAll({.kind = LineMessage::Kind::kGaveUp, .successor = successor});
  }
  if (!isIn) return checkTold(digest);
  readyFor(*before, digest);
}

// A rank that is taken out goes to a group in which nothing runs.
Result<std::unique_ptr<Group>> GroupLine::makeGroup(const Successor& successor, const Group& before,
                                                    const StopSignal& stop) {
  if (successor.isWithout(options_.group.rank)) {
    auto alone = options_.makeAlone(withExtent(options_.group, before.extent()));
    if (alone.ok()) (*alone)->fail(notActive(before, "was taken out by deactivate_ranks"));
    return alone;
  }
  const auto topics = topicsOf(successor.identity(options_.identity));
  if (!topics.ok()) return topics.error();
  GroupOptions options = events_->with(withMembers(options_.group, successor), successor.series);
  if (!isNewcomer()) options.bell = before.bell();  // a newcomer's is of another engine
  return Group::createOn(members_.job(), std::move(options), *topics, members_.rosterOf(successor),
                         Deadline::after(kPrepares), &stop);
}

void GroupLine::readyFor(Group& before, uint64_t digest) {
  {
    Lock ordered(readiness_);
    {
      Lock lock(mutex_);
      const Preparation* const one = successors_.find(digest);
      if (!one || one->isGivenUp) return;
    }
    // kExhausted cannot be: we make no more than it takes. kMoved: the move makes it void.
    (void)before.renewal().readyFor(digest);
  }
  failpoint("successor-ready");
  bool isWished;
  {
    Lock lock(mutex_);
    const Preparation* const one = successors_.find(digest);
    isWished = one && one->isWished;
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
    Preparation* const one = successors_.find(digest);
    if (!isIn_ || !one) return;
    one->isWished = true;
    if (one->group) wished = current_;
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
    const auto* const one = successors_.living(active);
    if (!one) return 0;
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
    Preparation* const one = successors_.find(digest);
    if (!one) return {};
    one->isGivenUp = true;
    word.successor = one->successor;
  }
  MOONCAKE_TRY(group.renewal().notReadyFor(digest, Deadline::after(kEnds)));
  {
    Lock lock(mutex_);
    if (!successors_.find(digest)) return {};
    post([gone = successors_.giveUp(digest)] {});  // its memory, and its thread, end there
  }
  members_.tellAll(word);
  return {};
}

void GroupLine::noteGivenUp(uint64_t digest) {
  Lock lock(mutex_);
  if (isIn_ && successors_.noteGivenUp(digest)) post([this] { dropVoid(); });
}

// On the line's thread. While a flush is under way, it is tried again with the next proposal.
void GroupLine::dropVoid() {
  const auto group = current();
  const std::vector<bool> active = activeOf(*group);
  std::vector<uint64_t> digests;
  {
    Lock lock(mutex_);
    if (current_ != group || isMoving_ || !isIn_) return;
    digests = successors_.voids(active);
  }
  for (const uint64_t digest : digests) (void)giveUp(*group, digest);
}

void GroupLine::noteMoved(uint64_t digest, int rank) {
  {
    Lock lock(mutex_);
    Preparation* const one = successors_.find(digest);
    if (isIn_ || !one) return;
    one->movedTo.insert(rank);
  }
  checkTold(digest);
}

// Newcomers: moves once all members that live have said that they did. A member that has said so may
// have died before any other has moved.
void GroupLine::checkTold(uint64_t digest) {
  Lock lock(mutex_);
  const Preparation* const one = successors_.find(digest);
  if (isIn_ || due_ || !one || !one->group || one->movedTo.empty()) return;
  const View view = members_.job()->viewOf(*members_.rosterOf(one->successor));
  for (int r = 0; r < options_.group.size; ++r) {
    if (!one->successor.hasNewcomerFor(r) &&
        view.active.contains(one->successor.jobRanks[size_t(r)]) && !one->movedTo.contains(r))
      return;
  }
  due_ = digest;
  post([this] { options_.onDue(); });
}

Result<std::vector<int>> GroupLine::recover(std::vector<int> ranks, Deadline ready,
                                            Deadline deadline, Unready unready,
                                            const std::map<int, uint64_t>& keys) {
  std::ranges::sort(ranks);
  std::vector<int> dropped;
  std::vector<Newcomer> asked;  // all that were wanted so far
  Asking asking;
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
      wanted = ready_.of(ranks, missing);
    }
    std::erase_if(wanted, [&](const Newcomer& newcomer) {
      const auto key = keys.find(newcomer.rank);
      if (key == keys.end() || key->second == ReadyNewcomers::keyOf(newcomer.id)) return false;
      std::erase(ranks, newcomer.rank);
      dropped.push_back(newcomer.rank);
      return true;
    });
    if (ranks.empty()) continue;
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
      MOONCAKE_TRY(ask(group, {.newcomers = wanted}, asking, deadline));
    }
    Lock lock(mutex_);
    changed_.wait_until(mutex_, Deadline::after(kLook).when());
  }
}

// Has a successor made like this one, and wishes for it. An error: it cannot be made, or the deadline
// has passed.
Status GroupLine::ask(const std::shared_ptr<Group>& group, const Successor& wanted, Asking& asking,
                      Deadline deadline) {
  if (const int now = proposerOf(*group); now != asking.proposer) {
    asking.proposer = now;
    asking.pause.reset();
  }
  if (asking.proposer == options_.group.rank) {
    propose(wanted);
  } else if (!asking.pause || asking.pause->takeDue(Clock::now())) {
    if (!asking.pause) asking.pause.emplace(kTellAgain, Clock::now());
    members_.tell(asking.proposer, {.kind = LineMessage::Kind::kAsk, .successor = wanted});
  }
  Status failed;
  {
    Lock lock(mutex_);
    failed = successors_.failureOf(asking.wished);
  }
  asking.wished = wishForLiving(*group, asking.wished);
  if (!failed.ok() || !deadline.passed()) return failed;
  const auto end = group->renewal().awaitEnd(Deadline::after(Clock::duration::zero()));
  if (giveUp(*group, asking.wished).code() == ErrorCode::kMoved) return {};
  return notMoved(*group, wanted, end.status());
}

Status GroupLine::remove(std::vector<int> ranks, Deadline deadline) {
  const bool isOwn = std::ranges::count(ranks, options_.group.rank) > 0;
  std::ranges::sort(ranks);
  Asking asking;
  for (;;) {
    const auto group = current();
    if (isOwn && isRemoved()) return {};
    MOONCAKE_TRY(group->usable());
    const std::vector<bool> members = membersOf(*group, members_, options_.keepsLost);
    std::erase_if(ranks, [&](int r) { return !members[size_t(r)]; });
    if (ranks.empty()) return {};
    if (waitsForCaller(*group)) {
      const Status goes = goesWithout(*group, ranks);
      if (!isOwn || !goes.ok()) return goes;
      {
        Lock lock(mutex_);
        isLeaving_ = true;
      }
      options_.onDue();
      if (deadline.passed() && current() == group) return notYetOut(*group);
    }
    {
      Lock lock(mutex_);
      if (isStopped_) return {ErrorCode::kAborted, "the process group was destroyed"};
      if (isMoving_ || current_ != group) continue;
    }
    MOONCAKE_TRY(ask(group, {.absent = ranks}, asking, deadline));
    Lock lock(mutex_);
    changed_.wait_until(mutex_, Deadline::after(kLook).when());
  }
}

// Ok: the successor for which a close is decided lacks all of these ranks.
Status GroupLine::goesWithout(const Group& group, const std::vector<int>& ranks) const {
  const auto close = group.renewal().close();
  Lock lock(mutex_);
  const Preparation* const next = successors_.find(close->successor);
  if (!next || std::ranges::includes(next->successor.absent, ranks)) return {};
  return anotherChange(group);
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
  return current_.get() == &group && !group.renewal().close() && !successors_.hasNewcomer(newcomer);
}

// Adds to `dropped` the ranks that are not in the successor for which a close is decided.
std::vector<int> GroupLine::withoutNewcomers(const Group& group, std::vector<int> ranks,
                                             std::vector<int> dropped) const {
  const auto close = group.renewal().close();
  Lock lock(mutex_);
  const Preparation* const next = successors_.find(close->successor);
  for (const int rank : ranks) {
    if (!next || !next->successor.hasNewcomerFor(rank)) dropped.push_back(rank);
  }
  std::ranges::sort(dropped);
  return dropped;
}

Status GroupLine::join(Deadline deadline) {
  std::optional<Repetition> asking;
  for (;;) {
    MOONCAKE_TRY(members_.job()->standing());
    std::vector<Successor> toldBySome;
    std::vector<uint64_t> digests;
    {
      Lock lock(mutex_);
      if (isIn_) return {};
      if (isStopped_) return {ErrorCode::kAborted, "the process group was destroyed"};
      isJoining_ = true;
      for (const auto& [digest, one] : successors_.entries()) {
        digests.push_back(digest);
        if (!one.movedTo.empty()) toldBySome.push_back(one.successor);
      }
    }
    if (deadline.passed()) return notLetIn(options_.group);
    for (const uint64_t digest : digests) checkTold(digest);  // a member may be lost since
    if (!asking || asking->takeDue(Clock::now())) {
      if (!asking) asking.emplace(kTellAgain, Clock::now());
      members_.tellAll(
          {.kind = LineMessage::Kind::kReady, .successor = {.jobRanks = members_.jobRanks()}});
      failpoint("ready");
      for (const Successor& successor : toldBySome)
        members_.tellAll(
            {.kind = LineMessage::Kind::kPrepare, .wishes = true, .successor = successor});
    }
    Lock lock(mutex_);
    changed_.wait_until(mutex_, Deadline::after(kLook).when());
  }
}

Status GroupLine::enterAgain(std::shared_ptr<Membership> job) {
  members_.job()->engine().closeTopic(members_.topic());
  const auto before = current();
  auto alone = options_.makeAlone(withExtent(options_.group, before->extent()));
  if (!alone.ok()) return alone.error();
  (*alone)->fail(notActive(*before, "is in the job again and not yet in the group"));
  SuccessorTable::Entries left;  // their threads take mutex_
  {
    Lock lock(mutex_);
    while (isMoving_) changed_.wait_until(mutex_, Deadline::after(kLook).when());
    left = successors_.takeAll();
    outside_ = std::move(*alone);
    isIn_ = isJoining_ = isLeaving_ = false;
    isRemoved_ = true;
    due_.reset();
    post([this] { options_.onDue(); });
  }
  left.clear();
  members_.use(std::move(job));
  listen();
  return {};
}

// Returns the group to which the line moves, if it is time. Null: it is not.
std::shared_ptr<Group> GroupLine::takeNext(Group& from, Successor& successor) {
  uint64_t digest;
  {
    Lock lock(mutex_);
    if (outside_) {
      successor = {
          .series = series_, .absent = {options_.group.rank}, .jobRanks = members_.jobRanks()};
      isMoving_ = true;
      return std::exchange(outside_, nullptr);
    }
    digest = due_.value_or(0);
  }
  if (digest == 0) {
    if (!from.renewal().hasEnded() && !leavesEarly(from)) return nullptr;
    digest = from.renewal().close()->successor;
  }
  Lock lock(mutex_);
  Preparation* const one = successors_.find(digest);
  if (!one || !one->group) return nullptr;  // only if given up: stop(), and if it moved before
  const auto to = one->group;
  successor = one->successor;
  isMoving_ = true;
  // What else was made is for this series: no other one will have it.
  post([all = successors_.takeAll()] {});
  due_.reset();
  return to;
}

std::shared_ptr<Group> GroupLine::moveOn() {
  const auto from = current();
  Successor successor;
  const auto to = takeNext(*from, successor);
  if (!to) return from;
  const bool isOut = successor.isWithout(options_.group.rank);
  std::vector<bool> stays(size_t(options_.group.size), !isOut && !isNewcomer());
  for (const Newcomer& newcomer : successor.newcomers) stays[size_t(newcomer.rank)] = false;
  options_.onMove(*to, stays);
  members_.moveTo(successor.jobRanks);
  events_->begin(successor.series, !isOut);  // before a caller of recover() or join() goes on
  {
    Lock lock(mutex_);
    current_ = to;
    extent_ = to->extent();
    isMoving_ = false;
    series_ = successor.series;
    isIn_ = !isOut;
    isRemoved_ = isOut;
    isJoining_ = isLeaving_ = false;
    lastMove_ = successor;
    retired_ = successor.retired;
    ready_.forget(successor);
    if (isOut) ready_.forgetAll();  // it does not hear of newcomers any more
    post([this, from] { end(from); });
    changed_.notify_all();
  }
  failpoint("renewed");
  for (const Newcomer& newcomer : successor.newcomers)
    members_.tell(newcomer.rank, {.kind = LineMessage::Kind::kMoved, .successor = successor});
  return to;
}

// Other members are in a call that lies before the close, and this rank, which takes itself out, never
// begins it. So it leaves as from a group that it destroys, and they go on without its part. Between
// two calls. False: not yet; a member may still need this rank for the call before.
bool GroupLine::leavesEarly(Group& from) {
  const auto close = from.renewal().close();
  {
    Lock lock(mutex_);
    if (!isLeaving_ || !close) return false;
    const Preparation* const one = successors_.find(close->successor);
    if (!one || !one->successor.isWithout(options_.group.rank)) return false;
  }
  failpoint("leaves-early");
  return from.agent().leaveSeries(Deadline::after(kEnds), FlushAgent::Leavers::kOnlyUs).ok();
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
  while (!tasks_.isIdle() || !successors_.areAllMade()) {
    if (deadline.passed()) return false;
    changed_.wait_until(mutex_, deadline.earlier(Deadline::after(kLook)).when());
  }
  return true;
}

void GroupLine::post(std::function<void()> task) {
  if (isStopped_) return;
  const Status posted = tasks_.post(std::move(task));
  if (!posted.ok())
    log(LogLevel::kWarning, members_.job()->engine().logName(), "group '", options_.group.name,
        "' cannot take newcomers in: ", posted.error().message);
}

}  // namespace mooncake
