#include "peers/peer_guard.h"

#include <atomic>
#include <span>
#include <utility>

#include "base/failpoint.h"
#include "base/log.h"
#include "base/thread.h"
#include "collectives/collectives.h"
#include "peers/gather_blocks.h"

namespace mooncake {
namespace {

using kernels::Decision;
using kernels::Failure;

constexpr std::chrono::microseconds kPause(50);       // between two looks at words of kernels
constexpr std::chrono::milliseconds kLook(1);         // the same while no rank is lost
constexpr std::chrono::seconds kStopTime(1);          // for kernels to stop after a timeout
constexpr std::chrono::milliseconds kStopsItself(1);  // a kernel that waits stops within this time

template <typename Word>
Word read(Word& word) {
  return HostAccess::loadAcquire(word);
}

}  // namespace

void ViewFeed::show(const GroupView& view) {
  Lock lock(mutex_);
  active_ = bitsOf(view.active);
  if (changed_) changed_();
}

uint64_t ViewFeed::active() const {
  Lock lock(mutex_);
  return active_;
}

void ViewFeed::listen(std::function<void()> changed) {
  Lock lock(mutex_);
  changed_ = std::move(changed);
}

Result<std::unique_ptr<PeerGuard>> PeerGuard::make(Group& control, ViewFeed& view,
                                                   kernels::HostWords& words, unsigned banks,
                                                   Functions functions,
                                                   std::chrono::milliseconds timeout) {
  std::unique_ptr<PeerGuard> guard(
      new PeerGuard(control, view, words, banks, std::move(functions), timeout));
  auto thread = startThread("mooncake-peers", [guard = guard.get()] { guard->run(); });
  if (!thread.ok()) return thread.error();
  guard->thread_ = std::move(*thread);
  // Not under its lock, which listen() takes after the view's.
  view.listen([guard = guard.get()] { guard->changed_.notify_all(); });
  control.engine().openTopic(
      control.topic() + 1,
      [guard = guard.get()](const EngineId&, ByteView message) { guard->onCalled(message); });
  control.watchReconnects([guard = guard.get()](int rank) {
    guard->call(rank, guard->calls_.load(std::memory_order_acquire));
  });
  return guard;
}

PeerGuard::PeerGuard(Group& control, ViewFeed& view, kernels::HostWords& words, unsigned banks,
                     Functions functions, std::chrono::milliseconds timeout)
    : control_(control),
      view_(view),
      words_(words),
      banks_(banks),
      functions_(std::move(functions)),
      timeout_(timeout),
      first_(bitsOf(control.lastView->active)),
      decisions_(words),
      active_(first_),
      epochs_{{active_, control.lastView->epoch}} {}

PeerGuard::~PeerGuard() {
  view_.listen(nullptr);
  control_.watchReconnects(nullptr);
  control_.engine().closeTopic(control_.topic() + 1);
  {
    Lock lock(mutex_);
    isStopping_ = true;
    changed_.notify_all();
  }
  // Ranks that leave at the same time take no part in an agreement any more.
  control_.fail({ErrorCode::kAborted, "the group was destroyed"});
  if (thread_.joinable()) thread_.join();
  refuse({ErrorCode::kAborted, "the group was destroyed while its operations ran"});
}

void PeerGuard::arm() {
  Lock lock(mutex_);
  isArmed_ = true;
  changed_.notify_all();
}

Result<uint64_t> PeerGuard::begin(std::string name, Deadline deadline) {
  Lock lock(mutex_);
  MOONCAKE_TRY(failure());
  called_.push_back({++lastCalled_, std::move(name), deadline});
  changed_.notify_all();
  return lastCalled_;
}

void PeerGuard::fail(Error why) {
  Lock lock(mutex_);
  if (!failure_) refuse(std::move(why));
}

Status PeerGuard::usable() const {
  Lock lock(mutex_);
  return failure();
}

// Kernels may have failed since the thread has looked.
Status PeerGuard::failure() const { return failure_ ? Status(*failure_) : failureOfKernels(); }

void PeerGuard::limit(uint64_t call, Deadline deadline) {
  Lock lock(mutex_);
  for (Called& called : called_)
    if (called.number == call) called.deadline = deadline;
}

uint64_t PeerGuard::done() const { return read(words_.done); }
uint64_t PeerGuard::ended() const { return read(words_.calls); }

uint64_t PeerGuard::lastCall() const {
  Lock lock(mutex_);
  return lastCalled_;
}

bool PeerGuard::hasEnded(uint64_t call) const {
  Lock lock(mutex_);
  return ended() >= call;
}

Status PeerGuard::await(uint64_t call, Deadline deadline) const {
  Lock lock(mutex_);
  while (ended() < call) {
    MOONCAKE_TRY(failure());
    if (deadline.passed()) return {ErrorCode::kTimeout, ""};
    changed_.wait_for(mutex_, kPause);
  }
  return {};
}

uint64_t PeerGuard::contributors(uint64_t call) const {
  uint64_t active = first_;
  const uint32_t count = read(words_.changeCount);
  for (const kernels::Change& change : std::span(words_.changes, count))
    if (call > change.lastCall) active = change.active;
  return active;
}

uint64_t PeerGuard::epochOf(uint64_t contributors) const {
  Lock lock(mutex_);
  const auto found = epochs_.find(contributors);
  return found == epochs_.end() ? 0 : found->second;
}

Error PeerGuard::rootLost(int root) const {
  return {ErrorCode::kPeerLost, "the root, " + control_.nameRank(root) +
                                    ", is lost: " + control_.whyGone(root) +
                                    ". Call it again with a root that is active"};
}

void PeerGuard::run() {
  Lock lock(mutex_);
  changed_.wait(mutex_, [&]() REQUIRES(mutex_) { return isArmed_ || isStopping_; });
  while (!isStopping_) {
    while (!called_.empty() && called_.front().number <= ended()) called_.pop_front();
    if (!failure_) {
      Status fine = failureOfKernels();
      // The rank is out of the job, or its side is too small to go on: no view tells that.
      if (fine.ok()) fine = control_.usable();
      const uint64_t late = fine.ok() ? lateOperation() : 0;
      if (fine.ok() && (hasLost() || isCalled() || late != 0)) {
        settle(late);
        continue;
      }
      if (fine.ok()) fine = checkTimeouts();
      if (!fine.ok()) refuse(fine.error());
    }
    awaitEvent();
  }
}

// The time of a graph's operation counts from the moment that its kernel tells a late rank.
Status PeerGuard::checkTimeouts() {
  if (!called_.empty() && called_.front().deadline.passed()) return timedOut(called_.front().name);
  const uint64_t parked = read(words_.parked);
  if (parked != parked_.number) parked_ = {parked, Deadline::after(timeout_)};
  if (done() < parked && parked_.deadline.passed()) return timedOut("a replayed operation");
  return {};
}

// Number of the operation in which this rank wants to skip late ranks; 0: none.
uint64_t PeerGuard::lateOperation() {
  const uint64_t number = read(words_.waits);
  if (number <= done() || number == settled_) return 0;
  if (number != waiting_.number) waiting_ = {number, Clock::now()};
  const auto patience =
      std::chrono::nanoseconds(std::atomic_ref(words_.skipNs).load(std::memory_order_relaxed));
  return Clock::now() - waiting_.since > patience ? number : 0;
}

// Has the other guards take part in the next agreement.
void PeerGuard::callOthers() {
  calls_.store(rounds_ + 1, std::memory_order_release);
  for (int rank = 0; rank < control_.size(); ++rank)
    if (active_ >> rank & 1) call(rank, rounds_ + 1);
}

// Wire form: u64 the agreement's number. A connection that breaks may lose the message, so it is
// sent again on the next one.
void PeerGuard::call(int rank, uint64_t round) const {
  ByteWriter message;
  const auto& peer = control_.window().peer(rank);
  if (peer && round != 0)
    (void)control_.engine().send(*peer, control_.topic() + 1, message.put(round).take());
}

// Runs on the loop's thread.
void PeerGuard::onCalled(ByteView message) {
  ByteReader in(message);
  const auto round = in.get<uint64_t>();
  if (!in.finish("").ok()) return;
  uint64_t last = calledFor_.load(std::memory_order_relaxed);
  while (last < round && !calledFor_.compare_exchange_weak(last, round)) continue;
  changed_.notify_all();
}

void PeerGuard::awaitEvent() {
  if (called_.empty() || failure_) {
    // The view changes without this lock, so a call of notify_all() may be missed.
    changed_.wait_for(mutex_, std::chrono::milliseconds(20));
  } else {
    changed_.wait_for(mutex_, kLook);
  }
}

// Waits until the group's kernels are stopped within an operation, or between two. A kernel that
// waits stops by itself, and the queue of launches may be full until then: so the kernel that stops
// them comes only after all calls or, on a stream of its own, when none has stopped so far.
Status PeerGuard::stopKernels(Deadline deadline) {
  decisions_.stop();
  failpoint("peers-stop");
  const Deadline stopsItself = Deadline::after(kStopsItself);
  bool isEnqueued = false;
  while (!decisions_.haveStopped()) {
    const bool isDue = functions_.isBeside ? stopsItself.passed() : ended() == lastCalled_;
    if (!isEnqueued && isDue) {
      isEnqueued = true;
      // With the lock: no call may begin until it is enqueued. On the stream of the calls there is
      // room for it, as all have ended.
      MOONCAKE_TRY(functions_.acknowledge());
    }
    MOONCAKE_TRY(failureOfKernels());
    if (isStopping_) return {ErrorCode::kAborted, "the group was destroyed"};
    if (deadline.passed()) {
      return {
          ErrorCode::kTimeout,
          "earlier work of the device, or a call of a Buffer whose hook was not called, kept the "
          "group's kernels from going on without a rank that is lost or late, for the group's "
          "timeout" +
              functions_.endsOf(active_)};
    }
    changed_.wait_for(mutex_, kPause);
  }
  return {};
}

// Agrees with the other guards on how kernels go on, without ranks that are lost or late.
void PeerGuard::settle(uint64_t late) {
  const Deadline deadline = Deadline::after(timeout_);
  if (late != 0) callOthers();
  const Status stopped = stopKernels(deadline);
  if (!stopped.ok()) return refuse(stopped.error());
  const PeerReport own{.done = done(),
                       .stoppedAt = words_.stoppedAt,
                       .ended = words_.ended,
                       .taken = words_.taken,
                       .hadAll = words_.hadAll,
                       .skipped = skipped_,
                       .late = late == words_.stoppedAt ? late : 0};
  std::vector<PeerReport> reports(size_t(control_.size()));
  std::vector<std::span<std::byte>> outputs;
  for (PeerReport& report : reports)
    outputs.push_back(std::as_writable_bytes(std::span(&report, 1)));
  Status agreed;
  uint64_t active;
  const uint64_t before = active_;
  {
    const UnlockedScope unlocked(mutex_);
    failpoint("peers-stopped");
    agreed =
        allgather(control_, std::as_bytes(std::span(&own, 1)), outputs, DType::kUInt64, deadline);
    failpoint("peers-agreed");
    active = bitsOf(control_.lastView->active);
    if (agreed.ok() && active != before) agreed = functions_.onLoss(active);
  }
  if (failure_) return;  // it was refused meanwhile
  if (!agreed.ok()) return refuse(agreed.error());
  ++rounds_;
  active_ = active;
  epochs_.emplace(active_, control_.lastView->epoch);
  const PeerVerdict verdict = verdictFor(control_.rank(), active, reports, banks_);
  skipped_ = verdict.skipped;
  waiting_ = {};
  // All that are left have begun it.
  if (verdict.skips) settled_ = verdict.partial;
  decisions_.decide(verdict);
}

// Kernels that wait, and all later ones, end without a result.
void PeerGuard::refuse(Error why) {
  if (failure_) return;
  failure_ = std::move(why);
  decisions_.refuse();
  changed_.notify_all();
  control_.fail(*failure_);
}

Status PeerGuard::failureOfKernels() const {
  const auto wrong = [&](const char* what) {
    return Error{ErrorCode::kInvalidArgument,
                 control_.nameRank(int(words_.failedRank)) + ": " + what};
  };
  switch (Failure(read(words_.failed))) {
    case Failure::kMismatch:
      return {ErrorCode::kMismatch,
              control_.nameRank(int(words_.failedRank)) + " has called another operation than " +
                  control_.nameRank(control_.rank()) + ", or with other sizes or types"};
    case Failure::kUndecided:
      return {ErrorCode::kTimeout,
              "a kernel has waited for its host's decision in vain" + functions_.endsOf(active_)};
    case Failure::kUnreceived:
      return wrong(
          "a graph was replayed between a call and its hook. Call the hook first, on all ranks");
    case Failure::kOut: {
      const Status usable = control_.usable();
      if (!usable.ok()) return usable;
      return {ErrorCode::kEvicted, "the other ranks have gone on without this one"};
    }
    case Failure::kSplits:
      return {ErrorCode::kMismatch,
              "the splits of a replayed all_to_all do not fit, or those of too many calls whose "
              "errors were not asked for. Nothing was changed"};
    case Failure::kNoSuchExpert:
      return wrong("topk_idx names an expert that does not exist");
    case Failure::kTooManyRows:
      return wrong(
          "its tokens name an expert more than once, and send it more rows than it has room for");
    case Failure::kOtherExpert:
      return wrong("topk_idx of combine names another expert than that of the dispatch");
    case Failure::kOtherDispatch:
      return {ErrorCode::kMismatch,
              control_.nameRank(int(words_.failedRank)) +
                  " combines the rows of another dispatch than " +
                  control_.nameRank(control_.rank()) +
                  ": all ranks must combine with the handles of the same dispatch"};
    case Failure::kNoPlace:
      return wrong("it receives more rows than it has places for. Make num_worst_tokens larger");
    case Failure::kNone:
    case Failure::kRefused:
      break;
  }
  return {};
}

Error PeerGuard::timedOut(const std::string& name) {
  const std::string what = name + " of " + control_.nameRank(control_.rank()) +
                           " has not ended on the device in the group's timeout";
  // A kernel that waits tells the ranks that it misses.
  if (!stopKernels(Deadline::after(kStopTime)).ok() || words_.missing == 0)
    return {ErrorCode::kTimeout, what + ": earlier work of the device still runs"};
  std::vector<int> missing;
  for (int rank = 0; rank < control_.size(); ++rank) {
    if (words_.missing >> rank & 1) missing.push_back(rank);
  }
  return {ErrorCode::kTimeout, what + ": it waits for " + control_.nameRanks(missing) +
                                   functions_.endsOf(words_.missing)};
}

}  // namespace mooncake
