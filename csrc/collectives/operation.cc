#include "collectives/operation.h"

#include <algorithm>
#include <map>

#include "base/log.h"

namespace mooncake {
namespace {

// While we wait for a straggler that has to leave our old slot, nobody rings: look again this
// often.
constexpr auto kStragglerLook = std::chrono::milliseconds(5);

// How long the evidence of a death may come after its first effect.
constexpr auto kEvidenceComes = std::chrono::seconds(1);

std::string listRanks(const Group& group, const std::vector<int>& ranks) {
  std::string text;
  for (const int r : ranks) text += (text.empty() ? "" : ", ") + group.nameRank(r);
  return text;
}

}  // namespace

Operation::Operation(Group& group, const Call& call, Deadline deadline)
    : group_(group),
      call_([&] {
        Call ours = call;
        ours.fullyMapped = group.window().fullyMapped();
        return ours;
      }()),
      deadline_(deadline),
      waiter_(group.waiter(deadline)),
      number_(++group.lastNumber),
      own_(slots(group.rank())),
      sealKind_(kSealedBy + group.rank()) {
  // A peer may have ended before this operation began: the first wait that does not succeed at once
  // must look.
  waiter_.generation = 0;
}

Operation::~Operation() {
  // Without open() our stamps still belong to the operation before the last, which a late rank may
  // be reading.
  if (!committed_ && opened_) {
    const uint64_t seal = makeStamp(number_, sealKind_);
    for (const StampWord word : {&Slot::begun, &Slot::ready, &Slot::done}) {
      if (tryStamp(own_->*word, seal)) signalUnmapped(rank(), word, seal);
    }
    ringMapped();
  }
  auto* endedWord =
      reinterpret_cast<std::atomic<uint64_t>*>(group_.window().local() + group_.layout().ended());
  endedWord->store(number_, std::memory_order_release);
}

Slot* Operation::slots(int rank) const {
  const Window& window = group_.window();
  std::byte* part = window.peerPtr(rank);
  return reinterpret_cast<Slot*>(part ? part + group_.layout().ownSlot(number_)
                                      : window.local() + group_.layout().inboxSlot(rank, number_));
}

Status Operation::open() {
  if (auto usable = group_.usable(); !usable.ok()) return usable;
  if (!group_.everybodyBegan) MOONCAKE_TRY(awaitStragglers());
  group_.everybodyBegan = false;
  opened_ = true;
  return {};
}

Status Operation::awaitStragglers() {
  // The operation before this one ended early here, so it does not prove that everybody has ended
  // the one before it, whose slot we are about to write. A rank that is late may still read it:
  // wait until it says that it has ended.
  if (number_ <= 2) return {};
  for (int r = 0; r < size(); ++r) {
    const std::byte* part = group_.window().peerPtr(r);
    if (!part || r == rank()) continue;
    const auto& endedWord =
        *reinterpret_cast<const std::atomic<uint64_t>*>(part + group_.layout().ended());
    // A rank that is gone reads no more.
    const auto left = [&] {
      return endedWord.load(std::memory_order_acquire) >= number_ - 2 || group_.window().ended(r);
    };
    while (!left()) {
      Waiter slice = waiter_;
      slice.deadline = deadline_.earlier(Deadline::after(kStragglerLook));
      const auto how = slice.until(left);
      if (how == WaitResult::kInterrupted) {
        waiter_.generation = waiter_.interrupt.generation();
        if (auto usable = group_.usable(); !usable.ok()) return usable;
      }
      if (how == WaitResult::kTimeout && deadline_.passed()) {
        return fail({ErrorCode::kTimeout, group_.nameRank(r) +
                                              " has not come back from operation #" +
                                              std::to_string(number_ - 2) + ", which timed out"});
      }
    }
  }
  return {};
}

Status Operation::begin(size_t payloadBytes) {
  own_->call = call_;
  own_->payloadBytes = payloadBytes;
  const uint64_t stamp = makeStamp(number_, kPublished);
  if (!tryStamp(own_->begun, stamp))
    return sealed(rank(), own_->begun.load(std::memory_order_acquire));

  const Window& window = group_.window();
  ringMapped();
  if (window.fullyMapped()) return {};
  constexpr size_t kStampEnd = offsetof(Slot, begun) + sizeof(Slot::begun);
  const size_t there = group_.layout().inboxSlot(rank(), number_);
  const std::span<const std::byte> data(reinterpret_cast<const std::byte*>(own_) + kStampEnd,
                                        kSlotHeaderBytes - kStampEnd + payloadBytes);
  for (int step = 1; step < size(); ++step) {
    const int r = (rank() + step) % size();
    if (window.peerPtr(r)) continue;
    // A channel that broke is found by whoever waits for the rank.
    auto sent = window.put(r, there + kStampEnd, data,
                           {.offset = there + offsetof(Slot, begun), .stamp = stamp});
    if (!sent.ok() && !window.ended(r) && sent.code() != ErrorCode::kPeerLost)
      return fail(sent.error());
  }
  return {};
}

Status Operation::awaitBegun(int rank) {
  MOONCAKE_TRY(awaitStamp(rank, &Slot::begun));
  if (slot(rank).call == call_) return {};

  // Not what we called. Everybody learns of it, because everybody compares; say who called what.
  std::map<std::string, std::vector<int>> callers;
  for (int r = 0; r < size(); ++r) {
    if (awaitStamp(r, &Slot::begun).ok()) {
      Call theirs = slot(r).call;
      std::string text = describeCall(theirs);
      if (theirs.fullyMapped != call_.fullyMapped)
        text += theirs.fullyMapped ? " over shared memory" : " over messages";
      callers[text].push_back(r);
    }
  }
  std::string who;
  for (const auto& [text, ranks] : callers)
    who += (who.empty() ? "" : "; ") + listRanks(group_, ranks) + " called " + text;
  group_.everybodyBegan = true;
  return fail(
      {ErrorCode::kMismatch, "the ranks called different operations: " + who +
                                 ". Nothing was changed; make all ranks call the same operation"});
}

Status Operation::awaitAllBegun() {
  for (; begunSeen_ < size(); ++begunSeen_) MOONCAKE_TRY(awaitBegun(begunSeen_));
  group_.everybodyBegan = true;
  return {};
}

Result<const std::byte*> Operation::payloadOf(int rank, size_t bytes) const {
  const Slot& theirs = slot(rank);
  if (theirs.payloadBytes == bytes) return theirs.payload;
  return Error{ErrorCode::kProtocol, title() + ": " + group_.nameRank(rank) + " sent " +
                                         std::to_string(theirs.payloadBytes) + " bytes where " +
                                         std::to_string(bytes) +
                                         " were due: do all ranks run the same version?"};
}

Status Operation::publishReady(const RemoteRegion& result) {
  own_->result = result;
  return publish(&Slot::ready, std::as_bytes(std::span(&own_->result, 1)));
}

Status Operation::awaitReady(int rank) { return awaitStamp(rank, &Slot::ready); }

Status Operation::commit() {
  committed_ = true;
  return {};
}

Status Operation::finish() {
  MOONCAKE_TRY(publish(&Slot::done));
  for (int r = 0; r < size(); ++r) MOONCAKE_TRY(awaitStamp(r, &Slot::done));
  return commit();
}

// `data` lies in our slot and goes with the stamp to the ranks that do not map it.
Status Operation::publish(StampWord word, std::span<const std::byte> data) {
  const uint64_t stamp = makeStamp(number_, kPublished);
  if (!tryStamp(own_->*word, stamp))
    return sealed(rank(), (own_->*word).load(std::memory_order_acquire));
  ringMapped();
  signalUnmapped(rank(), word, stamp, data);
  return {};
}

Status Operation::awaitStamp(int rank, StampWord word) {
  const auto& stamp = slots(rank)->*word;
  for (;;) {
    uint64_t seen = 0;
    const auto how = waiter_.until([&] {
      seen = stamp.load(std::memory_order_acquire);
      return stampNumber(seen) >= number_;
    });
    if (how == WaitResult::kReady) {
      if (seen == makeStamp(number_, kPublished)) return {};
      return sealed(rank, seen);
    }
    MOONCAKE_TRY(giveUpOn(rank, word, how));
  }
}

// ok: wait on. A stamp is decided by one compare-and-set: either its owner has published after all,
// or nobody will ever see it publish.
Status Operation::giveUpOn(int rank, StampWord word, WaitResult why) {
  const auto sealStampOf = [&](int owner, uint64_t kind) {
    const uint64_t seal = makeStamp(number_, kind);
    if (!tryStamp(slots(owner)->*word, seal)) return false;
    ringMapped();
    signalUnmapped(owner, word, seal);
    return true;
  };
  if (why == WaitResult::kInterrupted) {
    waiter_.generation =
        waiter_.interrupt.generation();  // before we look, so that the next change interrupts again
    if (auto usable = group_.usable(); !usable.ok()) return usable;
    // Any rank that is gone without this stamp ends the operation, not only the one that we wait
    // for: that one may have found the loss before us and wait for nobody any more.
    for (const int r : gone()) {
      if (sealStampOf(r, kLostRank + r)) return lost(r, *group_.window().ended(r));
    }
    return {};
  }
  if (!sealStampOf(rank, kSealedBy + this->rank())) return {};
  std::vector<int> missing;
  for (int r = 0; r < size(); ++r) {
    const uint64_t seen = (slots(r)->*word).load(std::memory_order_acquire);
    if (seen != makeStamp(number_, kPublished)) missing.push_back(r);
  }
  Error error{ErrorCode::kTimeout,
              title() + " timed out: waited for " + listRanks(group_, missing) +
                  (word == &Slot::begun ? ", which did not call it in time"
                                        : ", which began it but did not end it in time")};
  // Seals in memory are the same for everybody; those in messages may be too late for some rank.
  if (!group_.window().fullyMapped()) group_.fail(error);
  return error;
}

// The ranks that have ended; first those without a goodbye, because the others may have left on
// their account.
std::vector<int> Operation::gone() const {
  std::vector<int> ranks;
  for (const bool saidGoodbye : {false, true}) {
    for (int r = 0; r < size(); ++r) {
      if (const Evidence* seen = group_.window().ended(r); seen && seen->isGoodbye() == saidGoodbye)
        ranks.push_back(r);
    }
  }
  return ranks;
}

Status Operation::lost(int rank, const Evidence& evidence) {
  sealKind_ = kLostRank + rank;  // so that the others name it, too
  Error error{
      ErrorCode::kPeerLost,
      title() + ": " +
          (evidence.isGoodbye() ? group_.nameRank(rank) + " left the job"
                                : "lost " + group_.nameRank(rank) + ": " + evidence.detail)};
  group_.fail(error);
  return error;
}

Status Operation::sealed(int rank, uint64_t stamp) {
  if (auto usable = group_.usable(); !usable.ok()) return usable;
  if (stampNumber(stamp) == number_ && stampKind(stamp) >= kLostRank) {
    const int victim = static_cast<int>(stampKind(stamp) - kLostRank);
    if (victim < size()) {
      // Another rank may know before our own evidence has come.
      const Evidence* seen = group_.window().ended(victim);
      const Evidence testimony{.kind = Evidence::Kind::kExited,
                               .detail = "another rank found it gone"};
      return lost(victim, seen ? *seen : testimony);
    }
  }
  if (const Evidence* seen = group_.window().ended(rank)) return lost(rank, *seen);
  // A rank that gave up did so because of a loss, as a rule: then everybody names the rank that was
  // lost.
  if (const auto others = gone(); !others.empty())
    return lost(others[0], *group_.window().ended(others[0]));
  const int by = static_cast<int>(stampKind(stamp) - kSealedBy);
  if (stampNumber(stamp) != number_ || by < 0 || by >= size()) {
    return fail({ErrorCode::kProtocol, group_.nameRank(rank) + " is at operation #" +
                                           std::to_string(stampNumber(stamp))});
  }
  Error error{ErrorCode::kTimeout,
              title() + " was ended by " + group_.nameRank(by) +
                  (by == rank ? ", which could not end it (see its own error)"
                              : ", which waited too long for " + group_.nameRank(rank))};
  if (!group_.window().fullyMapped()) group_.fail(error);
  return error;
}

// What cannot be read from our memory goes as a signal: the stamp of `stampOwner`, into the inbox
// that each unmapped rank keeps for it (its own slot, for the owner itself).
void Operation::signalUnmapped(int stampOwner, StampWord word, uint64_t stamp,
                               std::span<const std::byte> data) {
  const Window& window = group_.window();
  if (window.fullyMapped()) return;
  const auto inSlot = [base = reinterpret_cast<const std::byte*>(own_)](const void* at) {
    return static_cast<size_t>(static_cast<const std::byte*>(at) - base);
  };
  for (int r = 0; r < size(); ++r) {
    if (window.peerPtr(r)) continue;
    const PartLayout& layout = group_.layout();
    const size_t there =
        r == stampOwner ? layout.ownSlot(number_) : layout.inboxSlot(stampOwner, number_);
    const size_t wordThere = there + inSlot(&(own_->*word));
    // A channel that broke is found by whoever waits for the rank.
    (void)window.put(r, data.empty() ? wordThere : there + inSlot(data.data()), data,
                     {.offset = wordThere, .stamp = stamp});
  }
}

void Operation::ringMapped() {
  const Window& window = group_.window();
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && window.peerPtr(r)) window.ring(r);
  }
}

Status Operation::fail(Error error) const {
  error.message = title() + ": " + error.message;
  return error;
}

std::string Operation::title() const {
  return describeCall(call_) + " #" + std::to_string(number_) + " of group '" + group_.name() +
         "' on " + group_.nameRank(rank());
}

Fetches::~Fetches() {
  if (!completion_.finished()) op_.group().window().cancelGets(completion_);
}

Status Fetches::start(int rank, const RemoteRegion& region, uint64_t offset,
                      std::span<std::byte> target) {
  if (target.empty()) return {};
  const Group& group = op_.group();
  if (offset > region.bytes || target.size() > region.bytes - offset) {
    return op_.fail({ErrorCode::kProtocol,
                     group.nameRank(rank) + " announced " + std::to_string(region.bytes) +
                         " bytes, " + std::to_string(offset + target.size()) + " are due"});
  }
  auto started = group.window().get(rank, region, offset, target, completion_);
  return started.ok() ? Status() : broken(started.error());
}

Status Fetches::await() {
  Group& group = op_.group();
  Waiter& waiter = op_.waiter_;
  for (;;) {
    const auto how = waiter.until([&] { return completion_.finished(); });
    if (how == WaitResult::kReady) break;
    if (how == WaitResult::kInterrupted) {
      // A channel that broke has ended its fetches with an error; somebody else's end is not our
      // concern here.
      waiter.generation = waiter.interrupt.generation();
      if (auto usable = group.usable(); !usable.ok()) return usable;
      continue;
    }
    Error error = op_.fail({ErrorCode::kTimeout, "timed out while fetching"}).error();
    if (!group.window().fullyMapped()) group.fail(error);
    return error;
  }
  const ErrorCode code = completion_.error.load(std::memory_order_acquire);
  if (code == ErrorCode::kOk) return {};
  return broken({code, std::string("fetching failed (") + errorCodeName(code) + ")"});
}

Status Fetches::broken(Error why) {
  Group& group = op_.group();
  if (why.code == ErrorCode::kPeerLost) {
    // The kernel may refuse to read a dead process before its socket has told us who died, and of
    // what: that comes at once.
    Waiter evidence = op_.waiter_;
    evidence.deadline = op_.deadline_.earlier(Deadline::after(kEvidenceComes));
    std::vector<int> gone;
    const auto known = [&] { return !(gone = op_.gone()).empty(); };
    while (evidence.until(known) == WaitResult::kInterrupted) {
      evidence.generation = evidence.interrupt.generation();
    }
    if (!gone.empty()) return op_.lost(gone[0], *group.window().ended(gone[0]));
  }
  const Error error = op_.fail(std::move(why)).error();
  group.fail(error);
  return error;
}

}  // namespace mooncake
