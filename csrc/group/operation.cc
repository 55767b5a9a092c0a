#include "group/operation.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/bytes.h"
#include "base/failpoint.h"
#include "base/rank_list.h"

namespace mooncake {
namespace {

// How long a fetch that failed waits for the reason, while its owner lives.
constexpr auto kReasonComes = std::chrono::seconds(1);
// Least patience of a second wish. Each wish costs a flush and an attempt, which need time.
constexpr auto kLeastPatience = std::chrono::milliseconds(50);

Deadline later(Deadline deadline, Clock::duration by) {
  const auto room = Clock::time_point::max() - deadline.when();
  return Deadline::at(deadline.when() + std::min<Clock::duration>(by, room));
}

}  // namespace

Operation::Operation(Group& group, const Call& call, Deadline deadline)
    : group_(group),
      agent_(group.agent()),
      call_([&] {
        Call ours = call;
        ours.fullyMapped = group.window().fullyMapped();
        ours.sinceLoss = group.callsSinceLoss;
        ours.from = uint64_t(group.calledFrom);
        ours.goesOn = call.goesOn || group.goesOn;
        return ours;
      }()),
      deadline_(deadline),
      called_(deadline.began()),
      waiter_(group.waiter(deadline)),
      number_(++group.lastNumber),
      own_(slots(group.rank())) {
  waiter_.cores = group.cores();
}

Slot* Operation::slots(int rank) const {
  const Window& window = group_.window();
  std::byte* part = window.peerPtr(rank);
  return reinterpret_cast<Slot*>(part ? part + group_.layout().ownSlot(number_)
                                      : window.local() + group_.layout().inboxSlot(rank, number_));
}

Status Operation::run(Algorithm& algorithm) {
  if (auto usable = group_.usable(); !usable.ok()) return usable;
  if (number_ > kMostOperations) [[unlikely]]
    return endForNumber();
  if (auto begun = agent_.begin(number_); !begun.ok()) {
    if (auto skipped = agent_.takeSkipped()) {
      endSkipped(std::move(skipped));
      return {};
    }
    if (begun.code() == ErrorCode::kMoved) return moved(begun.error());
    group_.lastView = agent_.viewWhenIdle();
    return named(begun.error());
  }
  if (patience_) waitToSkip(*patience_);
  Status status = attempt(algorithm);
  while (!status.ok() && !isAgreed_) {
    algorithm.stop(*this);
    auto resolution = resolve(std::move(status));
    if (resolution.kind == FlushAgent::Resolution::Kind::kEnded) {
      algorithm.rollBack(*this, Algorithm::Rollback::kError);
      if (resolution.view) group_.lastView = std::move(resolution.view);
      if (resolution.status.code() == ErrorCode::kMismatch) group_.hasMismatched = true;
      return named(resolution.status.error());
    }
    if (resolution.kind == FlushAgent::Resolution::Kind::kMoved) {
      algorithm.rollBack(*this, Algorithm::Rollback::kError);
      return moved(resolution.status.error());
    }
    if (resolution.kind == FlushAgent::Resolution::Kind::kSkipped) {
      algorithm.rollBack(*this, Algorithm::Rollback::kError);
      endSkipped(std::move(resolution.view));
      return {};
    }
    isTaking_ = resolution.kind == FlushAgent::Resolution::Kind::kTake;
    if (isTaking_) {
      failpoint("adopt");
      status = algorithm.complete(*this);
    } else {
      failpoint("roll-back");
      algorithm.rollBack(*this, Algorithm::Rollback::kAgain);
      status = attempt(algorithm);
    }
  }
  if (!status.ok()) {
    algorithm.stop(*this);
    algorithm.rollBack(*this, Algorithm::Rollback::kError);
  }
  if (group_.lastView.get() != view_) group_.lastView = kept_ ? kept_ : agent_.view();
  if (status.ok()) group_.lastBegun = number_;
  if (status.code() == ErrorCode::kMismatch) group_.hasMismatched = true;
  agent_.end(number_, status, call_.goesOn != 0);
  return status.ok() ? Status() : Status(named(status.error()));
}

// The series has ended before this operation, so the operation has no number.
Status Operation::moved(const Error& why) {
  --group_.lastNumber;
  return named(why);
}

// The other ranks have ended the operation without us. This rank has published nothing of it.
void Operation::endSkipped(std::shared_ptr<const GroupView> view) {
  isSkipped_ = true;
  kept_ = group_.lastView = std::move(view);
  view_ = kept_.get();
  group_.lastBegun = number_;
}

void Operation::skipAfter(Clock::duration patience) {
  if (!call_.goesOn) patience_ = patience;
}

void Operation::waitToSkip(Clock::duration patience) {
  skipAt_ = Deadline::after(patience);
  waiter_.deadline = deadline_.earlier(skipAt_);
}

// A stamp has no room for the number. All ranks come to it at the same operation.
Status Operation::endForNumber() {
  group_.fail({ErrorCode::kExhausted,
               "group '" + group_.name() + "' has run " + std::to_string(kMostOperations) +
                   " operations and cannot count further. Destroy the group and make it again"});
  return named(group_.usable().error());
}

Status Operation::attempt(Algorithm& algorithm) {
  kept_ = nullptr;
  view_ = agent_.view().get();
  stamp_ = makeStamp(number_, agent_.attempt());
  begunSeen_ = 0;
  calledFrom_ = 0;
  isTaking_ = isDone_ = false;
  MOONCAKE_TRY(agent_.awaitSlot(number_));
  MOONCAKE_TRY(goOn());
  MOONCAKE_TRY(algorithm.publish(*this));
  return algorithm.complete(*this);
}

FlushAgent::Resolution Operation::resolve(Status why) {
  using AbortReason = FlushReport::AbortReason;
  failpoint("park");
  if (!kept_) kept_ = agent_.view();
  const auto start = Clock::now();
  Error error = why.error();
  AbortReason abort = AbortReason::kAbort;
  if (error.code == ErrorCode::kInterrupted) {
    abort = AbortReason::kNone;
    error = {};
  } else if (error.code == ErrorCode::kTimeout) {
    abort = AbortReason::kTimeout;
  } else {
    error.message = group_.nameRank(rank()) + " could not go on: " + error.message;
  }
  waiter_.generation = waiter_.interrupt.generation();
  const bool wishes = std::exchange(wantsToSkip_, false);
  auto resolution = agent_.resolve(number_, called_, abort, std::move(error),
                                   wishes ? FlushAgent::Wish::kSkip : FlushAgent::Wish::kNone);
  // The time of the flush does not count as time of the operation.
  deadline_ = later(deadline_, Clock::now() - start);
  waiter_.deadline = deadline_;
  if (patience_) {
    if (wishes) *patience_ = std::max<Clock::duration>(2 * *patience_, kLeastPatience);
    waitToSkip(*patience_);
  }
  return resolution;
}

Status Operation::begin(size_t payloadBytes) { return publishBegun(payloadBytes, nullptr); }

Status Operation::beginSplit(size_t payloadBytes, const PayloadFor& write) {
  return publishBegun(payloadBytes, &write);
}

Status Operation::publishBegun(size_t payloadBytes, const PayloadFor* write) {
  constexpr size_t kStampEnd = offsetof(Slot, begun) + sizeof(Slot::begun);
  constexpr size_t kHeader = kSlotHeaderBytes - kStampEnd;
  failpoint("begin");
  agent_.begins(number_);
  if (waiter_.cores) waiter_.cores->note();
  group_.engine().markActive();
  own_->call = call_;
  own_->payloadBytes = static_cast<uint32_t>(payloadBytes);
  own_->isSplit = write != nullptr;
  const std::byte* const header = reinterpret_cast<const std::byte*>(own_) + kStampEnd;
  std::byte* split = nullptr;
  if (write) {
    auto scratch = group_.scratch(kHeader + payloadBytes);
    if (!scratch.ok()) return scratch.error();
    split = *scratch;
    std::memcpy(split, header, kHeader);
  }
  own_->begun.exchange(stamp_, std::memory_order_seq_cst);

  const Window& window = group_.window();
  ringMapped();
  if (window.fullyMapped()) return {};
  const size_t there = group_.layout().inboxSlot(rank(), number_);
  std::span<const std::byte> data(header, kHeader + payloadBytes);
  for (const int r : others()) {
    if (isMapped(r)) continue;
    if (write) {
      const auto bytes = static_cast<uint32_t>((*write)(r, split + kHeader));
      std::memcpy(split + offsetof(Slot, payloadBytes) - kStampEnd, &bytes, sizeof(bytes));
      data = {split, kHeader + bytes};
    }
    failpoint("put-begun");
    auto sent = window.put(r, there + kStampEnd, data,
                           {.offset = there + offsetof(Slot, begun), .stamp = stamp_});
    // A channel that broke is the membership's business.
    if (!sent.ok() && sent.code() != ErrorCode::kPeerLost) return sent.error();
  }
  return {};
}

void Operation::write(std::byte* to, std::span<const std::byte> data) const {
  if (group_.window().fullyMapped() && !group_.isCrowded()) return copyForPeers(to, data);
  if (!data.empty()) std::memcpy(to, data.data(), data.size());
}

size_t Operation::unmapped() const {
  if (group_.window().fullyMapped()) return 0;
  return size_t(std::ranges::count_if(ranks(), [&](int r) { return !isMapped(r); }));
}

// Numbers of calls and places of calls count only where the ranks compare them.
bool Operation::isOurCall(const Call& theirs) const {
  if (theirs == call_) [[likely]]
    return true;
  Call same = theirs;
  if (!group_.comparesCounts()) same.sinceLoss = call_.sinceLoss;
  if (!group_.hasMismatched) same.from = call_.from;
  return same == call_;
}

Status Operation::awaitBegun(int rank) {
  MOONCAKE_TRY(awaitStamp(rank, &Slot::begun));
  failpoint("see-begun");
  const Call& theirs = slot(rank).call;
  calledFrom_ |= 1u << theirs.from;
  return isOurCall(theirs) ? Status() : mismatch();
}

// Some rank's call is not ours. Every rank comes here, because each compares all calls with its
// own. The text says which ranks called what.
Status Operation::mismatch() {
  RankTexts callers;
  std::map<uint64_t, std::vector<int>> counts;  // ranks by Call::sinceLoss
  std::map<CalledFrom, std::vector<int>> places;
  for (const int r : ranks()) {
    MOONCAKE_TRY(awaitStamp(r, &Slot::begun));
    const Call theirs = slot(r).call;
    std::string text = describeCall(theirs);
    Call same = theirs;
    same.goesOn = call_.goesOn;
    if (theirs.goesOn != call_.goesOn && isOurCall(same))
      text += theirs.goesOn ? ", to be continued" : ", as the last of its call";
    if (theirs.fullyMapped != call_.fullyMapped)
      text += theirs.fullyMapped ? " over shared memory" : " over messages";
    callers.add(r, text);
    counts[theirs.sinceLoss].push_back(r);
    places[CalledFrom(theirs.from)].push_back(r);
  }
  const std::string who =
      callers.join("; ", [this](const std::vector<int>& called, const std::string& text) {
        return group_.nameRanks(called) + " called " + text;
      });
  if (view_->skipped.empty()) agent_.allBegan(number_);
  const bool areMixed =
      places.contains(CalledFrom::kCallback) &&
      (group_.hasMismatched ? places.size() > 1 : places.contains(CalledFrom::kBesideCallbacks));
  std::string difference;
  if (group_.comparesCounts() && counts.size() > 1) {
    for (const auto& [count, called] : counts) {
      difference += (difference.empty() ? "" : "; ") + group_.nameRanks(called) +
                    " called its operation " + std::to_string(count) +
                    " since the group began or lost a rank";
    }
  } else if (areMixed) {
    for (const auto& [place, called] : places) {
      difference += (difference.empty() ? "" : "; ") + group_.nameRanks(called) +
                    (place == CalledFrom::kCallback ? " called it in a callback of a future"
                                                    : " called it in the program");
    }
  } else {
    return agree({ErrorCode::kMismatch,
                  "the ranks called different operations: " + who +
                      ". Nothing was changed; make all ranks call the same operation"});
  }
  const bool isShift = !areMixed && !group_.hasMismatched;
  return agree(
      {ErrorCode::kMismatch,
       "the ranks are not at the same operation: " + difference + " (" + who +
           "). Nothing was changed; " +
           (isShift ? "call mooncake_backend.acknowledge_loss(group) on all ranks where they go on "
                      "together, then the same operation"
                    : "let the program wait for the future that then() returns before it calls the "
                      "next operation. DDP's PowerSGD hook does not: give DDP a bucket_cap_mb that "
                      "holds all gradients, or take bf16_compress_hook")});
}

Status Operation::awaitAllBegun(const std::function<void(int)>& onBegun) {
  for (; begunSeen_ < ranks().size(); ++begunSeen_) {
    MOONCAKE_TRY(awaitBegun(ranks()[begunSeen_]));
    if (onBegun) onBegun(ranks()[begunSeen_]);
  }
  constexpr unsigned kMixed =
      1u << unsigned(CalledFrom::kCallback) | 1u << unsigned(CalledFrom::kBesideCallbacks);
  if ((calledFrom_ & kMixed) == kMixed) return mismatch();
  if (view_->skipped.empty()) agent_.allBegan(number_);
  waiter_.deadline = deadline_;
  waiter_.spin = waiter_.spin.patient();
  failpoint("all-begun");
  return {};
}

bool Operation::hasBegun(int rank) const {
  return hasStamp(rank, &Slot::begun) && isOurCall(slot(rank).call);
}

Result<const std::byte*> Operation::payloadOf(int rank, size_t bytes) const {
  const Slot& theirs = slot(rank);
  if (theirs.payloadBytes == bytes) return theirs.payload;
  MOONCAKE_TRY(unlessFenced());
  return Error{ErrorCode::kProtocol, group_.nameRank(rank) + " sent " +
                                         std::to_string(theirs.payloadBytes) + " bytes where " +
                                         std::to_string(bytes) +
                                         " were due: do all ranks run the same version?"};
}

Status Operation::publishReady(const RemoteRegion& result) {
  failpoint("publish-ready");
  own_->result = result;
  putStamp(&Slot::ready, std::as_bytes(std::span(&own_->result, 1)));
  return {};
}

Status Operation::awaitReady(std::span<const int> some) {
  for (const int r : some) {
    MOONCAKE_TRY(awaitStamp(r, &Slot::ready));
    failpoint("see-ready");
  }
  return {};
}

Status Operation::awaitAllReady() {
  MOONCAKE_TRY(awaitReady(ranks()));
  failpoint("all-ready");
  return {};
}

Status Operation::put(int to, const RemoteRegion& region, uint64_t offset,
                      std::span<const std::byte> data, size_t word) {
  failpoint("put-data");
  const auto sent =
      group_.window().put(to, region, offset, data, {.offset = word, .stamp = stamp_});
  // A channel that broke is the membership's business.
  if (!sent.ok() && sent.code() != ErrorCode::kPeerLost) return sent;
  return {};
}

Status Operation::awaitPut(size_t word) {
  const auto& stamp =
      *reinterpret_cast<const std::atomic<uint64_t>*>(group_.window().local() + word);
  const auto waited = waitUntil([&] { return stamp.load(std::memory_order_acquire) == stamp_; });
  return waited.code() == ErrorCode::kTimeout ? dataTimedOut() : waited;
}

bool Operation::hadBegunLast(int rank) const {
  return group_.lastBegun + 1 == number_ && group_.lastView && group_.lastView->contains(rank);
}

Status Operation::commit() const {
  failpoint("commit");  // [commit-small] [commit-large]
  return unlessFenced();
}

// If this rank was stopped, the other ranks may have gone on without it, and it may have read data
// of a later operation. As long as a rank counts us in, it does not change the slots that we read,
// and it fences us before it goes on. So the data that we have read is valid if no rank has fenced
// us. Stamps do not prove that: a payload is packed before its stamp moves.
Status Operation::unlessFenced() const {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (const int r : ranks()) {
    if (group_.window().isFencedBy(r)) return {ErrorCode::kInterrupted, ""};
  }
  return {};
}

void Operation::publishDone() {
  if (std::exchange(isDone_, true)) return;
  failpoint("publish-done");
  putStamp(&Slot::done);
}

Status Operation::commitDone() {
  // The rank that has ended it has seen our `done`, too. The `done` of a rank that is out may never
  // arrive here.
  if (isTaking_) return unlessFenced();
  publishDone();
  for (const int r : ranks()) {
    MOONCAKE_TRY(awaitStamp(r, &Slot::done));
    failpoint("see-done");
  }
  return unlessFenced();  // [commit-done]
}

Status Operation::agree(Error error) {
  failpoint("agree");
  MOONCAKE_TRY(unlessFenced());
  isAgreed_ = true;
  return error;
}

Status Operation::agreeRootLost(int root) {
  return agree({ErrorCode::kPeerLost, "the root, " + group_.nameRank(root) +
                                          ", is lost: " + group_.whyGone(root) +
                                          ". Call it again with a root that is active"});
}

Status Operation::agreeNoPart() {
  return agree({ErrorCode::kInvalidArgument, "the buffers have parts for the first " +
                                                 std::to_string(call_.root) +
                                                 " ranks only, and none of them is active: give " +
                                                 std::to_string(group_.extent())});
}

std::vector<int> Operation::others() const {
  std::vector<int> others = ranks();
  const auto self = std::ranges::lower_bound(others, rank());
  std::rotate(others.begin(), self, others.end());
  others.erase(others.begin());
  return others;
}

Status Operation::goOn() const {
  if (agent_.isFrozen() || agent_.missesLeaver(number_))  // [miss-leaver]
    return {ErrorCode::kInterrupted, ""};
  return group_.usable();
}

// Stamps the word here, and sends the stamp with `data`, a part of our slot, to the ranks that do
// not map it.
void Operation::putStamp(StampWord word, std::span<const std::byte> data) {
  (own_->*word).exchange(stamp_, std::memory_order_seq_cst);
  ringMapped();
  const Window& window = group_.window();
  if (window.fullyMapped()) return;
  const auto inSlot = [base = reinterpret_cast<const std::byte*>(own_)](const void* at) {
    return static_cast<size_t>(static_cast<const std::byte*>(at) - base);
  };
  const size_t there = group_.layout().inboxSlot(rank(), number_);
  const size_t wordThere = there + inSlot(&(own_->*word));
  for (const int r : ranks()) {
    if (window.peerPtr(r)) continue;
    failpoint("put-stamp");
    // A channel that broke is the membership's business.
    (void)window.put(r, data.empty() ? wordThere : there + inSlot(data.data()), data,
                     {.offset = wordThere, .stamp = stamp_});
  }
}

bool Operation::hasStamp(int rank, StampWord word) const {
  return (slots(rank)->*word).load(std::memory_order_acquire) == stamp_;
}

// Like waitUntil(), but without a Status in the loop, because every small operation waits here.
Status Operation::awaitStamp(int rank, StampWord word) {
  const auto& stamp = slots(rank)->*word;
  for (;;) {
    const auto how = waiter_.until([&] { return stamp.load(std::memory_order_acquire) == stamp_; });
    if (how == WaitResult::kReady) return {};
    if (how == WaitResult::kTimeout) {
      wantsToSkip_ = word == &Slot::begun && !deadline_.passed();
      if (wantsToSkip_) return {ErrorCode::kInterrupted, ""};  // [wish]
      return timedOut(word);
    }
    MOONCAKE_TRY(lookUp());
  }
}

// Called after an interrupt. kInterrupted if it concerns this operation.
Status Operation::lookUp() {
  // Read before the look, so that a later interrupt ends the next wait.
  waiter_.generation = waiter_.interrupt.generation();
  return goOn();
}

std::vector<int> Operation::missing() const { return without(&Slot::begun); }

std::vector<int> Operation::without(StampWord word) const {
  std::vector<int> ranks = this->ranks();
  std::erase_if(ranks, [&](int r) { return hasStamp(r, word); });
  return ranks;
}

Status Operation::timedOut(StampWord word) const {
  const std::vector<int> missing = without(word);
  return {ErrorCode::kTimeout,
          "timed out: " + group_.nameRank(rank()) + " waited until the timeout for " +
              group_.nameRanks(missing) +
              (word == &Slot::begun ? ", which did not call it in time"
                                    : ", which began it but did not end it in time")};
}

// A fetch failed. Its owner's report or its loss arrives by other ways, and is waited for first.
Status Operation::explain(Error why) {
  Waiter waiter = waiter_;
  if (why.code != ErrorCode::kPeerLost)
    waiter.deadline = deadline_.earlier(Deadline::after(kReasonComes));
  for (;;) {
    MOONCAKE_TRY(lookUp());
    waiter.generation = waiter_.generation;
    if (waiter.until([] { return false; }) != WaitResult::kTimeout) continue;
    // As long as the owner does not count as lost, its connection may still be made again.
    return why.code == ErrorCode::kPeerLost ? dataTimedOut() : Status(why);
  }
}

Status Operation::dataTimedOut() const {
  return {ErrorCode::kTimeout, "timed out: " + group_.nameRank(rank()) +
                                   " waited until the timeout for the data of others"};
}

void Operation::ringMapped() {
  const Window& window = group_.window();
  for (const int r : ranks()) {
    if (r != rank() && window.peerPtr(r)) window.ring(r);
  }
}

Error Operation::named(Error error) const {
  error.message = describeCall(call_) + " #" + std::to_string(number_) + " of group '" +
                  group_.name() + "' on " + group_.nameRank(rank()) + ": " + error.message;
  return error;
}

void copyForPeers(std::byte* to, std::span<const std::byte> from) {
  constexpr size_t kFew = 8 << 10;  // below this a plain copy costs less than reads from memory
  if (from.size() > kFew) return copyPastCache(to, from);
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

void zeroMissing(const Operation& op, std::span<const std::span<std::byte>> outputs, size_t each) {
  if (op.ranks().size() == size_t(op.size())) return;
  for (int r = 0; size_t(r) * each < outputs.size(); ++r) {
    if (op.takesPart(r)) continue;
    for (const auto output : outputs.subspan(size_t(r) * each, each))
      std::ranges::fill(output, std::byte{});
  }
}

}  // namespace mooncake
