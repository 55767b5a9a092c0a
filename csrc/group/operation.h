#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "group/group.h"

namespace mooncake {

class Operation;

// What a verb does for an operation. The operation runs it, several times where a rank dies: the
// rule when a rank may return ok stands in one place (docs/membership.md).
class Algorithm {
 public:
  virtual ~Algorithm() = default;
  // Publishes what we give and goes as far as it can be undone. Every member in op.ranks() calls
  // op.begin() once.
  virtual Status publish(Operation& op) = 0;
  // From there to the result; the last thing it does is one of the two commits. Also called when
  // another rank has come to the end of this attempt and we have not: all that it needs is there
  // then, or on its way.
  virtual Status complete(Operation& op) = 0;
  // Ends the writes of an attempt that gave no result; this rank reports that next. No part of them
  // lands later, because other ranks may reuse that memory as soon as they have the report.
  virtual void stop(Operation&) {}
  // The attempt is over without a result. Puts back what was overwritten of the inputs, takes back
  // what was announced.
  enum class Rollback { kAgain, kError };
  virtual void rollBack(Operation&, Rollback) {}
};

// One operation of a group, seen from one rank: the stages that every algorithm is made of.
//
//   begin         publish our call with the payload (small) or where it can be fetched (large)
//   awaitBegun    the same of another rank, checked against our own call
//   publishReady  our share of the result, or what we fetched for our host, can be read
//   awaitReady    the same of other ranks
//   commit        everything that anybody needs for this operation is in memory that outlives us
//   publishDone   we have what we need, if that is to be said before commitDone
//   commitDone    every rank has what it needs
//
// Every wait ends with kInterrupted when the group is to resolve what happened: the algorithm
// returns at once, and is called again with what was decided.
class Operation {
 public:
  Operation(Group& group, const Call& call, Deadline deadline);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Who has not begun it when this much of it has passed is left out, if all agree: it is not lost,
  // and takes part in the next one.
  void skipAfter(Clock::duration patience) { patience_ = patience; }
  // To the end, whatever happens. The error has the operation's name in front.
  Status run(Algorithm& algorithm);

  Group& group() const { return group_; }
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }   // of the group
  uint64_t number() const { return number_; }  // from 1 on
  // Who takes part in this attempt, ascending; these contribute, and nobody else.
  const std::vector<int>& ranks() const { return view_->active; }
  bool takesPart(int rank) const { return view_->contains(rank); }
  // Of the others who is left out of it, ascending: they are in the job as before.
  const std::vector<int>& skipped() const { return view_->skipped; }
  // After an end without an error: these ranks() had it without us. complete() was not called.
  bool wasSkipped() const { return isSkipped_; }
  // The others of them, the next one after us first: so not all ask the same one at once.
  std::vector<int> others() const;

  // Our slot's payload, to be filled before begin(); group().slotBytes() long.
  std::byte* payload() const { return own_->payload; }
  // Copies into the payload, or the scratch memory of beginSplit().
  void write(std::byte* to, std::span<const std::byte> data) const;
  void announceInput(const RemoteRegion& region) { own_->input = region; }
  Status begin(size_t payloadBytes);
  // The same, but a rank that does not map us is put what `write` writes for it instead: at most as
  // much; the length is returned. The operation must end with commitDone() on all ranks, and
  // isSplit() tells them.
  using PayloadFor = std::function<size_t(int rank, std::byte* payload)>;
  Status beginSplit(size_t payloadBytes, const PayloadFor& write);
  // How many take part that do not map us: so many puts each stage costs.
  size_t unmapped() const;

  // `onBegun` is told of each when it has been seen, in the order of ranks().
  Status awaitAllBegun(const std::function<void(int rank)>& onBegun = {});
  // What the rank published; only once it has begun.
  const Slot& slot(int rank) const { return *slots(rank); }
  // It was put to us alone, once the rank has begun: see beginSplit().
  bool isPayloadOurs(int rank) const { return slot(rank).isSplit != 0 && !isMapped(rank); }
  bool isSplit(int rank) const { return slot(rank).isSplit != 0; }
  // It has begun this attempt, with our call. Does not wait.
  bool hasBegun(int rank) const;
  std::vector<int> missing() const;  // have not begun this attempt
  // The payload when it has exactly this length, else an error that names the rank.
  Result<const std::byte*> payloadOf(int rank, size_t bytes) const;

  Status publishReady(const RemoteRegion& result);
  Status awaitAllReady();
  Status awaitReady(std::span<const int> some);

  // Its caller had begun the operation before this one, so it is done with what it wrote for the
  // one before that. The end of an operation does not say so: see Group::lastBegun.
  bool hadBegunLast(int rank) const;
  // Into memory of a rank that does not map us, which told us of it before; then the word, at an
  // offset in its part, is stamped, for which it waits. Lost with the connection, as is all that is
  // put in an attempt.
  Status put(int to, const RemoteRegion& region, uint64_t offset, std::span<const std::byte> data,
             size_t word);
  Status awaitPut(size_t word);

  // The last step. commit(): of what all have begun, or of what all are ready with.
  // commitDone(): says that we have what we need, and waits until all say so.
  Status commit() const;
  Status commitDone();
  // The first half of it, for who still has something to do with what it has. From here to
  // commitDone() the algorithm waits for nothing and cannot fail: others may end the operation.
  void publishDone();

  // An error that every rank comes to by itself, because it follows from what all have published:
  // this is how the operation ends. The group goes on.
  Status agree(Error error);
  Status agreeRootLost(int root);

  // Long work without a wait in it asks now and then.
  Status goOn() const;
  // kInterrupted: somebody goes on without us. Whoever finds nonsense in what it reads of others
  // asks before it complains.
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
  void putStamp(StampWord word, std::span<const std::byte> data = {});
  template <typename IsReady>
  Status waitUntil(IsReady isReady);
  Status awaitStamp(int rank, StampWord word);
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
  std::shared_ptr<const GroupView> kept_;  // the view, once there may be a later one
  uint64_t stamp_;
  size_t begunSeen_ = 0;   // of ranks(): these have begun and agree with our call
  bool isTaking_ = false;  // another rank has ended this attempt well
  bool isDone_ = false;    // published in this attempt
  bool isAgreed_ = false;
  std::optional<Clock::duration> patience_;
  Deadline skipAt_ = Deadline::at(Clock::time_point::max());
  bool wantsToSkip_ = false;
  bool isSkipped_ = false;
};

// kTimeout as it is: the caller says what was missing.
template <typename IsReady>
Status Operation::waitUntil(IsReady isReady) {
  for (;;) {
    const auto how = waiter_.until(isReady);
    if (how == WaitResult::kReady) return {};
    if (how == WaitResult::kTimeout) return {ErrorCode::kTimeout, ""};
    MOONCAKE_TRY(lookUp());
  }
}

// Into memory that other cores have just read, and read again. A plain store first takes each line
// from their caches, one after the other: for 64 KiB that takes 7 to 28 us, by where the cores are;
// the copy past the cache takes 2, and they read it in 4.
void copyForPeers(std::byte* to, std::span<const std::byte> from);

// Of who does not take part there is nothing: zeros, never what was there before. The outputs of a
// rank lie side by side.
void zeroMissing(const Operation& op, std::span<const std::span<std::byte>> outputs);

// Data of one operation that cards write from where it stands into memory of ranks that told us of
// it before. As Operation::put(), but the data must stay as it is until it has been written. Cards
// keep no order, so an attempt leaves none of its writes under way: Algorithm::stop() calls end().
class Writes {
 public:
  explicit Writes(Operation& op) : op_(op) {}
  ~Writes() { end(); }
  Writes(const Writes&) = delete;
  Writes& operator=(const Writes&) = delete;

  // Where Window::hasCards(). The word is stamped when all of it is there.
  Status start(int to, const RemoteRegion& region, uint64_t offset, std::span<const std::byte> data,
               size_t word);
  // Does nothing more if all writes have landed. Otherwise waits for them 100 ms, and then until
  // the operation's deadline, `failure_timeout` at most. If ranks can be skipped, those that have
  // not begun get the 100 ms only. Then cancels the rest, and waits until their targets confirm
  // that no part of them comes late. A silent target is lost after `failure_timeout`, which ends
  // the wait. If a target lives and has not confirmed after ten failure timeouts, the group fails.
  void end();

 private:
  struct Target {
    Target(const RemoteRegion& region, Doorbell* bell) : region(region), completion(bell) {}
    bool hasLanded() const {
      return completion.finished() &&
             completion.error.load(std::memory_order_acquire) == ErrorCode::kOk;
    }
    RemoteRegion region;
    Completion completion;
  };

  void giveUp();
  template <typename IsOver>
  void wait(Deadline deadline, const IsOver& isOver) const;

  Operation& op_;
  std::map<std::pair<int, uint64_t>, Target> targets_;  // by rank and region
};

// Fetches of one operation that are waited for together. None of them touches its target any more
// when this object is gone.
class Fetches {
 public:
  explicit Fetches(Operation& op) : op_(op), completion_(&op.group().window().bell()) {}
  ~Fetches();
  Fetches(const Fetches&) = delete;
  Fetches& operator=(const Fetches&) = delete;

  struct Piece {
    uint64_t offset = 0;
    std::span<std::byte> target;
  };
  // The region must be one that the rank announced. Many pieces at once cost few system calls.
  Status start(int rank, const RemoteRegion& region, std::span<const Piece> pieces);
  Status start(int rank, const RemoteRegion& region, uint64_t offset, std::span<std::byte> target) {
    const Piece piece{offset, target};
    return start(rank, region, {&piece, 1});
  }
  Status await();

 private:
  Operation& op_;
  Completion completion_;
};

}  // namespace mooncake
