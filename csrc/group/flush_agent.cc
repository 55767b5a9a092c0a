#include "group/flush_agent.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "base/log.h"

namespace mooncake {
namespace {

using std::chrono::milliseconds;

// How often a frozen agent looks whether its caller has stopped. A caller that computes looks up
// only now and then, and one that has just ended its operation may have missed the freeze.
constexpr milliseconds kLookAgain(1);
// Limit of waits for other members, as a multiple of failure_timeout. A member that is alive
// answers, and the job's view takes out any other. The limit is for the case that neither happens.
constexpr int kBudgets = 10;

milliseconds resendAfter(const EngineEnv& env) {
  return std::clamp(env.failureTimeout / 10, milliseconds(50), milliseconds(500));
}

}  // namespace

FlushAgent::FlushAgent(FlushOwner& owner, Membership& membership, Options options)
    : owner_(owner),
      membership_(membership),
      options_(std::move(options)),
      endedWord_(owner.endedWordOf(options_.rank)),
      machine_([&]() -> FlushMachine::Options {
        const View job = membership_.viewOf(*options_.roster);
        const auto isOut = [&](int jobRank) { return !job.active.contains(jobRank); };
        return {
            .group = options_.group,
            .rank = options_.rank,
            .size = static_cast<int>(options_.jobRanks.size()),
            .raises = options_.raises,
            .founds = options_.founds,
            .lostBefore = static_cast<uint32_t>(std::ranges::count_if(options_.jobRanks, isOut)),
            .mostRounds = kMostRounds,
            .resend = resendAfter(membership_.engine().env()),
            .globalRanks = options_.globalRanks};
      }()),
      outbox_(owner, membership, *options_.roster, options_.jobRanks, options_.topic),
      renewal_(*this) {
  for (size_t r = 0; r < options_.jobRanks.size(); ++r) {
    if (const auto& peer = options_.roster->peer(options_.jobRanks[r]))
      ranksById_[peer->id] = static_cast<int>(r);
  }
  view_ = allView_ = std::make_shared<GroupView>(GroupView{.active = machine_.active()});
}

// The order matters: an answer to a message may be lost with its connection. onReconnected() must
// tell us of that.
void FlushAgent::start() {
  // A group may have places that no rank has had, in a job of which no rank is out.
  const bool hasRoom = std::ranges::count(options_.jobRanks, Roster::kNobody) > 0;
  membership_.subscribe(this, options_.roster, hasRoom);
  membership_.engine().openTopic(
      options_.topic, [this](const EngineId& from, ByteView message) { onMessage(from, message); });
}

// When this returns, the loop's tasks have ended, and later ones do nothing. A timer may still keep
// this agent alive for a moment, but none of the objects that it refers to. The engine takes over
// the last words before this agent ceases to hear of reconnections.
void FlushAgent::stop() {
  {
    Lock lock(mutex_);
    std::vector<int> others = machine_.active();
    std::erase_if(others, [this](int r) REQUIRES(mutex_) {
      return r == options_.rank || !machine_.isActive(r);
    });
    outbox_.leave(others, machine_.lastWords());
    isStopped_ = true;
    frozen_ = false;
    isLeftOut_ = false;
  }
  membership_.unsubscribe(this);  // waits for the loop's tasks
  membership_.engine().closeTopic(options_.topic);
}

// -- actions of the machine

FlushAgent::Step::Step(FlushAgent& agent) : agent_(agent) {
  agent.mutex_.lock();
  agent.machine_.hasEnded(agent.endedWord_->load(std::memory_order_acquire));
}

FlushAgent::Wait::Wait(FlushAgent& agent, Clock::time_point called)
    : agent_(agent), called_(called) {
  Lock lock(agent_.mutex_);
  agent_.isWaiting_ = true;
}

FlushAgent::Wait::~Wait() {
  GroupRanks gone;
  {
    Lock lock(agent_.mutex_);
    agent_.isWaiting_ = false;
    gone = std::exchange(agent_.gone_, {});
  }
  if (!gone.empty())
    agent_.membership_.heldUp(*agent_.options_.roster, agent_.toJobRanks(gone), called_);
}

void FlushAgent::take(FlushActions actions) {
  hasLeaver_.store(machine_.hasLeaver(), std::memory_order_release);
  for (auto& action : actions)
    std::visit([this](auto& one) REQUIRES(mutex_) { take(one); }, action);
  settle();
}

void FlushAgent::take(FlushAction::Freeze) {
  failpoint("join");
  isLeftOut_ = false;
  frozen_.store(true, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // see begin()
  owner_.interruptAll();
}

void FlushAgent::take(const FlushAction::End& end) {
  failpoint("decide");
  endedWord_->store(end.number, std::memory_order_release);
  failpoint("act");
}

// Copies the slot under the lock: afterwards the caller may use the slot again. A rank that maps
// our part reads our slot in place.
void FlushAgent::take(const FlushAction::Supply& supply) {
  if (supply.of == options_.rank && owner_.endedWordOf(supply.to)) return;
  if (auto copy = owner_.copyPart(supply.number, supply.of))
    outbox_.add(FlushOutbox::Part{supply.to, std::move(*copy)});
}

void FlushAgent::take(FlushAction::GoOn& goOn) {
  failpoint("acted");
  if (isWaiting_) {
    for (const int r : allView_->active) {
      if (!std::ranges::binary_search(goOn.members, r)) gone_.add(r);
    }
  }
  view_ = allView_ = std::make_shared<GroupView>(
      GroupView{.epoch = goOn.viewEpoch, .active = std::move(goOn.members)});
  if (goOn.first.number != 0) view_ = viewOf(goOn.first);
  attempt_ = goOn.attempt;
  if (const auto& close = machine_.close()) {
    failpoint("close");
    renewal_.closes(*close);
  }
  const bool isLeftOut = machine_.leftOutOf().number != 0;
  frozen_.store(isLeftOut, std::memory_order_seq_cst);
  isLeftOut_.store(isLeftOut, std::memory_order_seq_cst);
  owner_.ring();
}

void FlushAgent::take(FlushAction::Tell& tell) {
  outbox_.add(FlushOutbox::Letter{.to = std::move(tell.to),
                                  .message = encodeFlushMessage(tell.message),
                                  .isFarewell = tell.message.kind == FlushMessage::Kind::kLeft});
}

// Reports, if the caller has stopped. Sets the timers of events that no other thread brings.
void FlushAgent::settle() {
  if (machine_.wantsReport() && !busy_.load(std::memory_order_acquire)) {
    // Since this step began, the caller may have ended its operation. It stores `ended` before it
    // clears `busy`.
    machine_.hasEnded(endedWord_->load(std::memory_order_acquire));
    failpoint("report");
    return take(machine_.stopped());
  }
  tellSeriesEnd();
  if (isStopped_) return;
  if (machine_.wantsToMove()) return take(machine_.move(Clock::now()));
  if (machine_.isFrozen() && !machine_.hasReported() && !isLooking_) {
    isLooking_ = true;
    runAt(Deadline::after(kLookAgain), &FlushAgent::lookAgain);
  }
  if (const auto tick = machine_.nextTick(); tick && !isTicking_) {
    isTicking_ = true;
    runAt(Deadline::at(*tick), &FlushAgent::awaitTick);
  }
}

void FlushAgent::tellSeriesEnd() {
  if (isEndTold_ || machine_.isFrozen() || !renewal_.hasEnded()) return;
  isEndTold_ = true;
  failpoint("moved");
  outbox_.add(*machine_.close());
  owner_.ring();
}

void FlushAgent::lookAgain() {
  isLooking_ = false;
  settle();
}

void FlushAgent::awaitTick() {
  isTicking_ = false;
  take(machine_.tick(Clock::now()));
}

void FlushAgent::runAt(Deadline when, void (FlushAgent::*step)()) {
  membership_.engine().loop().runAt(when, [weak = weak_from_this(), step] {
    const auto self = weak.lock();
    if (!self) return;
    const Step locked(*self);
    if (!self->isStopped_) ((*self).*step)();
  });
}

// -- calls of the caller

Status FlushAgent::beginSlowly(uint64_t number) {
  const Wait wait(*this, Clock::now());
  for (;;) {
    {
      const Step step(*this);
      busy_ = false;
      if (auto usable = owner_.usable(); !usable.ok()) return usable;
      if (renewal_.isBehind(number)) return Renewal::moved();
      if (ended() >= number) {
        const auto skipped = machine_.takeSkipped(number);
        if (!skipped) return machine_.howEnded(number);
        skipped_ = viewOf(*skipped);
        return {ErrorCode::kInterrupted, ""};
      }
      if (!frozen_) {
        busy_ = true;
        isWithout_ = view_ != allView_;
        return {};
      }
      settle();
    }
    MOONCAKE_TRY(awaitDecision());
    MOONCAKE_TRY(awaitSkipped());
  }
}

Status FlushAgent::awaitDecision() {
  const auto budget = kBudgets * membership_.engine().env().failureTimeout;
  Waiter waiter = owner_.waiter(Deadline::after(budget));
  for (;;) {
    const auto how = waiter.until([&] { return !isFrozen() || isLeftOut_.load(); });
    if (auto usable = owner_.usable(); !usable.ok()) return usable;
    if (how == WaitResult::kReady) return {};
    waiter.generation = waiter.interrupt.generation();
    if (how == WaitResult::kInterrupted) continue;
    std::string missing;
    {
      Lock lock(mutex_);
      missing = nameRanks(machine_.missing(), options_.globalRanks);
    }
    owner_.fail({ErrorCode::kTimeout,
                 "group '" + options_.group + "' on " + nameRank(options_.rank) +
                     " could not agree on how its operation ends: no report of " + missing +
                     ", which the job believes alive. Destroy the group and make it again"});
  }
}

FlushAgent::Resolution FlushAgent::resolve(uint64_t number, Clock::time_point called,
                                           FlushReport::AbortReason abort, Error why, Wish wish) {
  const Wait wait(*this, called);
  {
    Lock lock(mutex_);
    isResolving_ = true;
  }
  const Resolution resolution = awaitResolved(number, abort, std::move(why), wish);
  Lock lock(mutex_);
  isResolving_ = false;
  return resolution;
}

FlushAgent::Resolution FlushAgent::awaitResolved(uint64_t number, FlushReport::AbortReason abort,
                                                 Error why, Wish wish) {
  {
    const Step step(*this);
    busy_ = false;
    if (auto usable = owner_.usable(); !usable.ok())
      return {Resolution::Kind::kEnded, usable, nullptr};
    machine_.begins(begun_);
    if (wish == Wish::kSkip) machine_.wishesToSkip(number);
    take(machine_.parked(number, abort, std::move(why), Clock::now()));
  }
  for (;;) {
    if (auto decided = awaitDecision(); !decided.ok())
      return {Resolution::Kind::kEnded, decided, nullptr};
    if (auto awaited = awaitSkipped(); !awaited.ok())
      return {Resolution::Kind::kEnded, awaited, nullptr};
    const Step step(*this);
    if (renewal_.isBehind(number)) return {Resolution::Kind::kMoved, Renewal::moved(), nullptr};
    if (ended() >= number) {
      if (const auto skipped = machine_.takeSkipped(number))
        return {Resolution::Kind::kSkipped, {}, viewOf(*skipped)};
      return {Resolution::Kind::kEnded, machine_.howEnded(number), view_};
    }
    if (frozen_) {  // again, since the decision
      settle();
      continue;
    }
    busy_ = true;
    isWithout_ = view_ != allView_;
    isTaking_ = machine_.toTake() == number;
    return {isTaking_ ? Resolution::Kind::kTake : Resolution::Kind::kAgain, {}, nullptr};
  }
}

Status FlushAgent::awaitSlot(uint64_t number) { return awaitSlot(number, true); }

Status FlushAgent::awaitSlot(uint64_t number, bool isBusy) {
  if (number <= 2 || allBegan_ + 1 >= number) return {};
  const EngineEnv& env = membership_.engine().env();
  // The operation's deadline does not count here: the other members are copying, or soon out of the
  // view.
  const auto budget = Deadline::after(kBudgets * env.failureTimeout);
  const auto isFree = [&] {
    Lock lock(mutex_);
    return machine_.isSlotFree(number);
  };
  Repetition asking({resendAfter(env), kMostPause}, Clock::now());
  for (;;) {
    const Waiter waiter = owner_.waiter(budget.earlier(Deadline::at(asking.next())));
    const auto how = waiter.until([&] { return (isBusy && isFrozen()) || isFree(); });
    if (auto usable = owner_.usable(); !usable.ok()) return usable;
    if (isBusy && isFrozen()) return {ErrorCode::kInterrupted, ""};
    if (how == WaitResult::kReady) return {};
    if (how == WaitResult::kInterrupted) continue;
    if (budget.passed()) {
      owner_.fail({ErrorCode::kTimeout, "group '" + options_.group +
                                            "': a member has not ended operation #" +
                                            std::to_string(number - 2) +
                                            ", though the job believes it alive. Destroy the "
                                            "group and make it again"});
    }
    // A member's message that it has ended the operation may be lost.
    if (!asking.takeDue(Clock::now())) continue;
    const Step step(*this);
    take(machine_.askForSlot(number));
  }
}

bool FlushAgent::missesLeaverSlowly(uint64_t number) const {
  Lock lock(mutex_);
  return machine_.missesLeaver(number);
}

void FlushAgent::end(uint64_t number, const Status& status, bool goesOn) {
  if (!status.ok()) {
    Lock lock(mutex_);
    machine_.endsWith(number, status.error());
  } else if (goesOn) {
    renewal_.goesOnAfter(number);
  }
  failpoint("ended");
  endedWord_->store(number, std::memory_order_release);
  failpoint("copy-out");
  busy_.store(false, std::memory_order_release);
  if (!isTaking_ && !isWithout_ && !isFrozen() && !renewal_.isDecided()) return;

  const Step step(*this);
  if (std::exchange(isWithout_, false) && !frozen_) view_ = allView_;
  if (std::exchange(isTaking_, false)) {
    take(machine_.caughtUp());
  } else {
    settle();
  }
}

// -- queries

std::shared_ptr<const GroupView> FlushAgent::viewWhenIdle() const {
  Lock lock(mutex_);
  return allView_;
}

FlushState FlushAgent::state() const {
  Lock lock(mutex_);
  return {.attempt = machine_.attempt(),
          .isFrozen = machine_.isFrozen(),
          .target = machine_.target(),
          .hasReported = machine_.hasReported(),
          .isBusy = busy_,
          .missing = machine_.missing(),
          .viewEpoch = machine_.viewEpoch(),
          .active = machine_.active(),
          .left = machine_.left(),
          .ended = machine_.knownEnded(),
          .close = machine_.close(),
          .wish = machine_.wish(),
          .unready = machine_.wish() ? machine_.unready(machine_.wish()) : std::vector<int>()};
}

bool FlushAgent::isActive(int rank) const {
  Lock lock(mutex_);
  return machine_.isActive(rank);
}

// The last operation that the rank is known to have ended.
uint64_t FlushAgent::endedOf(int rank) const {
  if (const auto* word = owner_.endedWordOf(rank)) return word->load(std::memory_order_acquire);
  Lock lock(mutex_);
  return machine_.knownEnded()[size_t(rank)];
}

void FlushAgent::noteMissed(const GroupView& before, const GroupView& now) {
  const auto ranksOf = [](const GroupView& view) {
    GroupRanks ranks;
    for (const int r : view.active) ranks.add(r);
    for (const int r : view.skipped) ranks.add(r);
    return ranks;
  };
  const GroupRanks missed = ranksOf(before) - ranksOf(now);
  if (!missed.empty()) membership_.missed(*options_.roster, toJobRanks(missed));
}

JobRanks FlushAgent::toJobRanks(const GroupRanks& members) const {
  JobRanks ranks;
  members.forEach([&](int r) {
    const int jobRank = options_.jobRanks[size_t(r)];
    if (jobRank != Roster::kNobody) ranks.add(jobRank);
  });
  return ranks;
}

// -- events of other ranks

void FlushAgent::onMessage(const EngineId& from, ByteView bytes) {
  const auto sender = ranksById_.find(from);
  if (sender == ranksById_.end()) return;
  const int rank = sender->second;
  const auto message = decodeFlushMessage(bytes, static_cast<int>(options_.jobRanks.size()));
  using Kind = FlushMessage::Kind;
  const bool isReport =
      message.ok() && message->kind != Kind::kEnded && message->kind != Kind::kAsk;
  if (!message.ok() || (isReport && message->report.from != rank)) {
    owner_.fail({ErrorCode::kProtocol, nameRank(rank) +
                                           " sent a message of a flush that does not decode: do "
                                           "all ranks run the same version?"});
    return;
  }
  const Step step(*this);
  take(machine_.received(rank, *message, Clock::now()));
}

FlushView FlushAgent::viewOf(const View& job) const {
  FlushView view{.epoch = job.epoch};
  const auto seen = membership_.seen(*options_.roster);
  for (int r = 0; r < static_cast<int>(options_.jobRanks.size()); ++r) {
    const int jobRank = options_.jobRanks[size_t(r)];
    if (job.active.contains(jobRank)) {
      view.active.push_back(r);
      continue;
    }
    if (!options_.roster->isRank(jobRank) || !membership_.isLost(*options_.roster, jobRank))
      continue;
    auto& [rank, detail] = view.losses.emplace_back(FlushView::Loss{r, ""});
    const auto why =
        std::ranges::find(seen, jobRank, [](const auto& one) { return one.accusation.rank; });
    if (why == seen.end()) continue;
    // Another rank may have reported the loss before we saw it ourselves.
    detail = !why->detail.empty() ? why->detail
             : why->accusation.cause == Cause::kEnded
                 ? "its program ended without "
                   "destroy_process_group()"
                 : "rank " + std::to_string(why->accusation.by) + " says so";
  }
  return view;
}

void FlushAgent::onView(const View& job) {
  const FlushView view = viewOf(job);
  const Step step(*this);
  owner_.onView({.epoch = view.epoch, .active = view.active});
  owner_.interruptAll();
  take(machine_.viewed(view, Clock::now()));
}

void FlushAgent::onOver(const Error& why) { owner_.fail(why); }  // [evicted]

void FlushAgent::onReconnected(int jobRank) {
  const auto found = std::ranges::find(options_.jobRanks, jobRank);
  if (found == options_.jobRanks.end()) return;
  const auto rank = static_cast<int>(found - options_.jobRanks.begin());
  {
    const Step step(*this);
    if (!std::ranges::binary_search(machine_.active(), rank)) return;
    const bool isInOperation = isResolving_ || busy_.load(std::memory_order_acquire);
    take(machine_.reconnected(rank, isInOperation, Clock::now()));
  }
  owner_.onReconnected(rank);
}

}  // namespace mooncake
