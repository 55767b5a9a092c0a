#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "group/group.h"

namespace mooncake {

class Operation;

// The part of an operation that its verb defines. Operation::run() calls it, several times if a
// rank dies. The rule for when a rank may return ok is in Operation (docs/membership.md).
class Algorithm {
 public:
  virtual ~Algorithm() = default;
  // Publishes this rank's data and does every step that can be undone. Every member in op.ranks()
  // calls op.begin() once.
  virtual Status publish(Operation& op) = 0;
  // Goes on from there to the result; its last step is one of the two commits. Also called if
  // another rank has ended this attempt and this rank has not. Then all that it needs has arrived,
  // or is on its way.
  virtual Status complete(Operation& op) = 0;
  // Ends the writes of an attempt that gave no result; this rank reports that next. No part of them
  // lands later, because other ranks may reuse that memory as soon as they have the report.
  virtual void stop(Operation&) {}
  // The attempt is over without a result. Restores overwritten inputs, and withdraws announced
  // regions.
  enum class Rollback { kAgain, kError };
  virtual void rollBack(Operation&, Rollback) {}
};

// One operation of a group, seen from one rank: the stages that every algorithm is made of.
//
//   begin         publish our call with the payload (small) or the place to fetch it from (large)
//   awaitBegun    wait for the call of another rank, and compare it with ours
//   publishReady  our share of the result, or the data that we fetched for our host, can be read
//   awaitReady    wait for the same of other ranks
//   commit        all data that a rank needs for this operation is in memory that outlives us
//   publishDone   this rank has all that it needs; optional, before commitDone
//   commitDone    every rank has all that it needs
//
// Every wait ends with kInterrupted if the group has to decide how the operation ends. The
// algorithm then returns at once, and is called again after the decision.
class Operation {
 public:
  Operation(Group& group, const Call& call, Deadline deadline);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Ranks that have not begun the operation after `patience` are left out of it, if all agree. They
  // are not lost, and take part in the next operation. Without effect if further operations of the
  // call follow: where those end a series, a rank that was left out would have to know.
  void skipAfter(Clock::duration patience);
  // Runs the operation until it has ended, in any way. The error begins with the operation's name.
  // kMoved: the group's series has ended before it, and it has published nothing.
  Status run(Algorithm& algorithm);

  Group& group() const { return group_; }
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }   // of the group
  uint64_t number() const { return number_; }  // from 1 on
  // The ranks that take part in this attempt, ascending. Only these contribute.
  const std::vector<int>& ranks() const { return view_->active; }
  bool takesPart(int rank) const { return view_->contains(rank); }
  // The ranks that are left out of this attempt, ascending. They stay in the job.
  const std::vector<int>& skipped() const { return view_->skipped; }
  // True after an end without an error, if the ranks() ran the operation without this rank.
  // complete() was not called.
  bool wasSkipped() const { return isSkipped_; }
  // All other ranks(), from the next one after us on, so that not all ask the same rank at once.
  std::vector<int> others() const;

  // The payload of our slot, group().slotBytes() long. Filled before begin().
  std::byte* payload() const { return own_->payload; }
  // Copies into the payload, or the scratch memory of beginSplit().
  void write(std::byte* to, std::span<const std::byte> data) const;
  void announceInput(const RemoteRegion& region) { own_->input = region; }
  Status begin(size_t payloadBytes);
  // The same, but a rank that does not map us receives a payload of its own. `write` produces it,
  // at most `payloadBytes`, and returns its length. The operation must end with commitDone() on all
  // ranks; isSplit() tells them.
  using PayloadFor = std::function<size_t(int rank, std::byte* payload)>;
  Status beginSplit(size_t payloadBytes, const PayloadFor& write);
  // Number of ranks() that do not map us. Each stage costs a put to each of them.
  size_t unmapped() const;

  // Waits until all ranks() have begun, and calls `onBegun` for each, in their order.
  Status awaitAllBegun(const std::function<void(int rank)>& onBegun = {});
  // The slot that the rank has published. Valid once it has begun.
  const Slot& slot(int rank) const { return *slots(rank); }
  // The rank has put a payload for us alone, see beginSplit(). Valid once it has begun.
  bool isPayloadOurs(int rank) const { return slot(rank).isSplit != 0 && !isMapped(rank); }
  bool isSplit(int rank) const { return slot(rank).isSplit != 0; }
  // The rank has begun this attempt, with our call. Does not wait.
  bool hasBegun(int rank) const;
  std::vector<int> missing() const;  // the ranks() that have not begun this attempt
  // Returns the payload of the rank. kProtocol if its length is another one; the text names the
  // rank.
  Result<const std::byte*> payloadOf(int rank, size_t bytes) const;

  Status publishReady(const RemoteRegion& result);
  Status awaitAllReady();
  Status awaitReady(std::span<const int> some);

  // The rank's caller has begun the operation before this one, so it no longer writes for the one
  // before that. The end of an operation does not prove that: see Group::lastBegun.
  bool hadBegunLast(int rank) const;
  // Puts `data` into memory of a rank that does not map us, which has announced that memory. Then
  // stamps the word at offset `word` of the rank's part; awaitPut() waits there for it. If the
  // connection breaks, this and all other puts of the attempt are lost.
  Status put(int to, const RemoteRegion& region, uint64_t offset, std::span<const std::byte> data,
             size_t word);
  Status awaitPut(size_t word);

  // The last step. commit(): for results made from data that all ranks have published, at begin or
  // as ready. commitDone(): publishes that this rank has all that it needs, and waits until all
  // ranks have published that.
  Status commit() const;
  Status commitDone();
  // The first half of commitDone(), for algorithms that still process their data. From here to
  // commitDone() the algorithm must not wait and must not fail: other ranks may end the operation.
  void publishDone();

  // Ends the operation with an error that every rank finds by itself, because it follows from the
  // published slots. Returns the error. The group goes on.
  Status agree(Error error);
  Status agreeRootLost(int root);
  // The buffers of the call have no part for this rank, nor for any that takes part.
  Status agreeNoPart();

  // kInterrupted: this attempt must stop. Other errors: the group has ended. Long work that does
  // not wait asks now and then.
  Status goOn() const;
  // kInterrupted: another rank goes on without us, and data that we have read may be wrong. Asked
  // before wrong data of another rank becomes an error.
  Status unlessFenced() const;

 private:
  friend class Fetches;
  friend class Writes;
  using StampWord = std::atomic<uint64_t> Slot::*;

  Slot* slots(int rank) const;
  bool isMapped(int rank) const { return group_.window().peerPtr(rank) != nullptr; }
  Status publishBegun(size_t payloadBytes, const PayloadFor* write);
  Status endForNumber();
  Status attempt(Algorithm& algorithm);
  FlushAgent::Resolution resolve(Status why);
  Status awaitBegun(int rank);
  bool isOurCall(const Call& theirs) const;
  Status mismatch();
  void putStamp(StampWord word, std::span<const std::byte> data = {});
  template <typename IsReady>
  Status waitUntil(IsReady isReady);
  Status awaitStamp(int rank, StampWord word);
  Status moved(const Error& why);
  void endSkipped(std::shared_ptr<const GroupView> view);
  void waitToSkip(Clock::duration patience);
  bool hasStamp(int rank, StampWord word) const;
  Status lookUp();
  std::vector<int> without(StampWord word) const;
  Status timedOut(StampWord word) const;
  Status explain(Error why);
  Status dataTimedOut() const;
  void ringMapped();
  Error named(Error error) const;

  Group& group_;
  FlushAgent& agent_;
  const Call call_;
  Deadline deadline_;
  const Clock::time_point called_;
  Waiter waiter_;
  const uint64_t number_;
  Slot* const own_;
  const GroupView* view_;
  std::shared_ptr<const GroupView> kept_;  // keeps view_, once there may be a later one
  uint64_t stamp_;
  size_t begunSeen_ = 0;     // number of ranks() that have begun and agree with our call
  unsigned calledFrom_ = 0;  // of these: a bit for each CalledFrom
  bool isTaking_ = false;    // another rank has ended this attempt well
  bool isDone_ = false;      // published in this attempt
  bool isAgreed_ = false;
  std::optional<Clock::duration> patience_;
  Deadline skipAt_ = Deadline::at(Clock::time_point::max());
  bool wantsToSkip_ = false;
  bool isSkipped_ = false;
};

// Waits until `isReady`. Returns kTimeout without a text: the caller names the missing data.
template <typename IsReady>
Status Operation::waitUntil(IsReady isReady) {
  for (;;) {
    const auto how = waiter_.until(isReady);
    if (how == WaitResult::kReady) return {};
    if (how == WaitResult::kTimeout) return {ErrorCode::kTimeout, ""};
    MOONCAKE_TRY(lookUp());
  }
}

// Copies into memory that other cores have just read and will read again. A plain store first takes
// each line from their caches, one after the other: 7 to 28 us for 64 KiB, depending on the cores.
// A copy past the cache takes 2 us, and the other cores then read the data in 4 us.
void copyForPeers(std::byte* to, std::span<const std::byte> from);

// Fills the outputs of ranks that do not take part with zeros, so that no old contents stay. `each`:
// outputs of a rank, which are consecutive in `outputs`.
void zeroMissing(const Operation& op, std::span<const std::span<std::byte>> outputs,
                 size_t each = 1);

}  // namespace mooncake
