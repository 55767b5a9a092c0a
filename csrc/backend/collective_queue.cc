#include "backend/collective_queue.h"

#include <utility>

#include <c10/util/Exception.h>

#include "base/log.h"
#include "base/thread.h"

namespace mooncake {
namespace {

// Whether an operation of the group ended with the loss of a rank, on all ranks.
bool isLoss(const Group& group, ErrorCode code) {
  return code == ErrorCode::kPeerLost || (code == ErrorCode::kInputsLost && !group.lostInputsOnly);
}

// Who is out from the beginning is lost to no operation of this series.
std::shared_ptr<const GroupView> membersOf(const Group& series) {
  auto members = std::make_shared<GroupView>();
  for (int r = 0; r < series.size(); ++r) {
    if (series.agent().isActive(r)) members->active.push_back(r);
  }
  return members;
}

}  // namespace

CollectiveQueue::CollectiveQueue(GroupLine& line, bool raises,
                                 std::shared_ptr<Completions> completions,
                                 std::shared_ptr<CompletionHooks> hooks,
                                 std::shared_ptr<const ActiveRanks> activeRanks)
    : line_(line),
      raises_(raises),
      completions_(std::move(completions)),
      hooks_(std::move(hooks)),
      activeRanks_(std::move(activeRanks)),
      series_(line.current().get()),
      lastView_(membersOf(*series_)) {}

CollectiveQueue::~CollectiveQueue() {
  if (thread_.joinable()) thread_.join();
}

bool CollectiveQueue::stop(Deadline deadline) {
  {
    Lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    const auto isIdle = [&]() REQUIRES(mutex_) { return !running_ && items_.empty(); };
    if (!changed_.wait_until(mutex_, deadline.when(), isIdle)) return false;
  }
  if (thread_.joinable()) thread_.join();
  return true;
}

// A new operation ends with the loss as long as that is not seen. A callback of an
// operation that was called before the loss was seen continues work that the program has given up.
bool CollectiveQueue::isHeld() {
  if (held_ && held_->loss->isSeen()) release();
  if (held_) return true;
  if (!last_ || !CallbackScope::isActive()) return false;
  const CallbackOrigin origin = CallbackScope::origin();
  return origin.queue == this && origin.era != era_;
}

void CollectiveQueue::release() {
  held_.reset();
  called_ = 0;
  ++era_;
  issuers_ = std::make_shared<Issuers>();
  lastIssuer_ = 0;
}

// Callbacks of this queue's own works are not counted. They run on all ranks in the
// same order, but the program's calls come between them at different places. Each of them ends with
// the loss on all ranks or on none, as its work was called before the loss or after it. This is not
// so for callbacks of other works: of messages, batches, other groups, and torch's own futures.
void CollectiveQueue::number(CollectiveWork& work) {
  work.number_ = called_++;
  const bool isCallback = CallbackScope::isActive();
  work.isCounted_ = !isCallback || CallbackScope::origin().queue != this;
  work.calledFrom_ = !work.isCounted_        ? CalledFrom::kCallback
                     : attached_->load() > 0 ? CalledFrom::kBesideCallbacks
                                             : CalledFrom::kProgram;
  if (work.isCounted_) ++position_;
  if (raises_ && !isCallback) {
    const uint64_t thread = Issuers::thisThread();
    if (thread != lastIssuer_) issuers_->add(lastIssuer_ = thread);
  }
  work.position_ = position_;
  work.era_ = era_;
}

// The caller runs it.
void CollectiveQueue::begins(const CollectiveWork& work) {
  running_ = true;
  numberBefore_ = series_->lastNumber;
  series_->callsSinceLoss = work.position_ - lossPosition_;
  series_->calledFrom = work.calledFrom_;
}

// A call that was refused before it took a number of the group's is not counted:
// the other ranks wait for the right one.
void CollectiveQueue::noteUncounted(const CollectiveWork& work) {
  if (!work.isCounted_ || series_->lastNumber != numberBefore_) return;
  Lock lock(mutex_);
  ++lossPosition_;
}

// Of the thread that runs an operation, without the lock. `next`: the operation that is to run in the
// next series; null: none runs. Returns whether there is a next series. The counts of calls begin
// again in it, on all ranks alike, for a newcomer knows none of the earlier ones.
bool CollectiveQueue::beginSeries(const CollectiveWork* next) {
  const std::shared_ptr<Group> to = line_.moveOn();
  if (to.get() == series_) return false;
  Lock lock(mutex_);
  series_ = to.get();
  lastView_ = membersOf(*series_);
  const CollectiveWork* first = next ? next : items_.empty() ? nullptr : items_.front().work.get();
  lossPosition_ = first ? first->position_ - (first->isCounted_ ? 1 : 0) : position_;
  if (next) begins(*next);
  return true;
}

void CollectiveQueue::moveOn() {
  while (!tryMoveOn()) {
    Lock lock(mutex_);
    if (stopping_) return;
    if (running_) changed_.wait(mutex_);
  }
}

bool CollectiveQueue::tryMoveOn() {
  {
    Lock lock(mutex_);
    if (running_ || stopping_) return false;
    running_ = true;
  }
  (void)beginSeries(nullptr);
  finishedOne();
  return true;
}

bool CollectiveQueue::tryBegin(CollectiveWork& work) {
  Lock lock(mutex_);
  if (running_ || stopping_ || !items_.empty() || isHeld()) return false;
  number(work);
  begins(work);
  return true;
}

void CollectiveQueue::finishedOne() {
  Lock lock(mutex_);
  running_ = false;
  changed_.notify_all();
}

Status CollectiveQueue::failureOf(const CollectiveWork& work, const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return {ErrorCode::kSystem, work.describe() + " failed in torch, on this rank: " +
                                  (torchs ? torchs->what_without_backtrace() : error.what())};
}

// Ends the operation that has just run.
void CollectiveQueue::end(const c10::intrusive_ptr<CollectiveWork>& work, Status status) {
  Ending ending{.status = std::move(status)};
  if (series_->lastView && lastView_ != series_->lastView)
    ending.before = std::exchange(lastView_, series_->lastView);
  if (ending.before) series_->agent().noteMissed(*ending.before, *lastView_);
  ending.view = lastView_;
  if (auto kept = activeRanks_->kept()) ending.before = std::move(kept);
  if (ending.status.ok() || !raises_ || !isLoss(*series_, ending.status.code())) {
    const bool isDone = ending.status.ok();
    if (!isDone) noteUncounted(*work);
    work->finish(std::move(ending), *completions_);
    if (isDone) hooks_->tell(work->getCompletionKey());
    return;
  }
  // Taken out before anybody can see the exception: what is issued afterwards is to run.
  std::deque<Item> discarded;
  {
    Lock lock(mutex_);
    ending.loss = std::make_shared<Loss>(ending.status.error(), issuers_);
    held_ = last_ = ending;
    isAcknowledged_ = false;
    lossPosition_ = work->position_;
    discarded.swap(items_);
  }
  work->finish(ending, *completions_);
  for (Item& item : discarded) {
    item.work->finish(ending, *completions_);
    letGo(std::move(item));
  }
}

// The last references to tensors may die with the item, and their Python halves need Python's
// lock.
void CollectiveQueue::letGo(Item item) {
  completions_->post([item = std::make_shared<Item>(std::move(item))] {});
}

void CollectiveQueue::enqueue(c10::intrusive_ptr<CollectiveWork> work, Run run) {
  Lock lock(mutex_);
  const bool held = isHeld();
  number(*work);
  if (held) {
    Ending ending = held_ ? *held_ : *last_;
    lock.unlock();
    work->finish(std::move(ending), *completions_);
    tellWaiting();
    return;
  }
  if (stopping_) {
    lock.unlock();
    work->finish({.status = {ErrorCode::kAborted, "the process group was destroyed"}},
                 *completions_);
    tellWaiting();
    return;
  }
  items_.push_back({work, std::move(run)});
  changed_.notify_all();
  if (thread_.joinable()) return;
  auto thread = startThread("mooncake-async", [this] { runThread(); });
  if (thread.ok()) {
    thread_ = std::move(*thread);
    return;
  }
  lock.unlock();
  log(LogLevel::kWarning, work->describe(),
      "runs on the thread that called it: ", thread.error().message);
  help(*work);
}

// A caller may wait for work that another thread submits.
void CollectiveQueue::tellWaiting() {
  Lock lock(mutex_);
  changed_.notify_all();
}

void CollectiveQueue::runFront() {
  Item item = std::move(items_.front());
  items_.pop_front();
  begins(*item.work);
  {
    const UnlockedScope unlocked(mutex_);
    end(item.work, outcomeOf(*item.work, item.run));
    letGo(std::move(item));
  }
  running_ = false;
  changed_.notify_all();
}

void CollectiveQueue::runThread() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(mutex_,
                  [&]() REQUIRES(mutex_) { return !running_ && (stopping_ || !items_.empty()); });
    if (items_.empty()) return;
    runFront();
  }
}

thread_local int CollectiveQueue::OperationInterrupt::alive = 0;

void CollectiveQueue::OperationInterrupt::giveUp(const std::string& why) {
  const auto group = line_.current();
  group->fail({ErrorCode::kAborted, "group '" + group->name() + "' is over on " +
                                        group->nameRank(group->rank()) + ": " + why +
                                        ", in an operation. Destroy it and make it again"});
}

void CollectiveQueue::sleep(OperationInterrupt& interrupt, Deadline deadline) {
  if (!interrupt.isActive() || interrupt.wasInterrupted()) {
    changed_.wait_until(mutex_, deadline.when());
    return;
  }
  const Deadline slice = Deadline::after(OperationInterrupt::kInterval);
  if (changed_.wait_until(mutex_, slice.earlier(deadline).when()) == std::cv_status::no_timeout)
    return;
  const UnlockedScope unlocked(mutex_);
  interrupt.onSleep();
}

void CollectiveQueue::help(const CollectiveWork& work) {
  OperationInterrupt interrupt(line_);
  Lock lock(mutex_);
  while (!work.finished()) {
    if (!running_ && !items_.empty()) {
      runFront();
    } else {
      sleep(interrupt, Deadline::at(Clock::time_point::max()));
    }
  }
  interrupt.rethrow();
}

bool CollectiveQueue::await(const CollectiveWork& work, Deadline deadline) {
  OperationInterrupt interrupt(line_);
  Lock lock(mutex_);
  while (!work.finished() && !deadline.passed()) sleep(interrupt, deadline);
  interrupt.rethrow();
  return work.finished();
}

bool CollectiveQueue::drain(Deadline deadline) {
  Lock lock(mutex_);
  return changed_.wait_until(mutex_, deadline.when(),
                             [&]() REQUIRES(mutex_) { return !running_ && items_.empty(); });
}

uint64_t CollectiveQueue::called() {
  Lock lock(mutex_);
  (void)isHeld();
  return called_;
}

bool CollectiveQueue::acknowledgeLoss(Deadline deadline) {
  // Callbacks of operations before this point call theirs before it, on all ranks.
  const bool haveRun = completions_->drain(deadline);
  OperationInterrupt interrupt(line_);
  Lock lock(mutex_);
  while ((running_ || !items_.empty()) && !deadline.passed()) sleep(interrupt, deadline);
  interrupt.rethrow();
  if (!haveRun || running_ || !items_.empty()) {
    const auto ours = line_.current();
    throwError({ErrorCode::kTimeout,
                "acknowledge_loss on " + ours->nameRank(ours->rank()) +
                    " timed out: operations that were called before, or callbacks of their "
                    "futures, have not ended. wait() for them first"});
  }
  if (std::exchange(isAcknowledged_, true)) return false;
  lossPosition_ = position_;
  called_ = 0;
  if (last_ && last_->loss) last_->loss->acknowledge();
  // Otherwise the loss was seen, and a later operation has released the queue.
  if (held_) release();
  return true;
}

bool CollectiveQueue::isCallerInside() { return OperationInterrupt::alive > 0; }

}  // namespace mooncake
