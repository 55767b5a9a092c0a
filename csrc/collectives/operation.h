#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/result.h"
#include "collectives/group.h"

namespace mooncake {

// One operation of a group, seen from one rank: the stages that every algorithm is made of, so that
// the rule when a rank may return ok stands in one place (docs/membership.md).
//
//   begin         publish our call with the payload (small) or where it can be fetched (large)
//   awaitBegun    the same of another rank, checked against our own call
//   publishReady  our share of the result can be fetched          } large
//   awaitReady    the same of another rank                        } reductions only
//   finish        everybody has what it needs: only where some part of the group is not mapped by
//   load and store,
//                 or where peers still fetch from our user's memory
//
// Every stamp of a stage is published by its owner or sealed, never both: whoever waits too long
// seals the stamp that it waits for, a rank that ends early seals its own, and then nobody can end
// this operation with ok.
class Operation {
 public:
  Operation(Group& group, const Call& call, Deadline deadline);
  // An operation that ends early seals its own stamps, so that nobody waits for them.
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  Group& group() const { return group_; }
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }

  // Waits until our slot may be written again. Everything below comes after it.
  Status open();
  // Our slot's payload, to be filled before begin(); group().slotBytes() long.
  std::byte* payload() const { return own_->payload; }
  void announceInput(const RemoteRegion& region) { own_->input = region; }
  Status begin(size_t payloadBytes);

  Status awaitBegun(int rank);
  Status awaitAllBegun();
  // What the rank published; only after awaitBegun(rank).
  const Slot& slot(int rank) const { return *slots(rank); }
  // The payload when it has exactly this length, else an error that names the rank.
  Result<const std::byte*> payloadOf(int rank, size_t bytes) const;

  Status publishReady(const RemoteRegion& result);
  Status awaitReady(int rank);

  // The last step of an operation. commit(): all that anybody needs is in slots and regions that
  // outlive us. finish(): tells everybody that we have all that we need, waits until everybody says
  // so, then commits.
  Status commit();
  Status finish();

  Status fail(Error error) const;  // passes the error on, with the operation's name in front

 private:
  friend class Fetches;
  using StampWord = std::atomic<uint64_t> Slot::*;

  Slot* slots(int rank) const;
  Status awaitStragglers();
  Status publish(StampWord word, std::span<const std::byte> data = {});
  Status awaitStamp(int rank, StampWord word);
  Status giveUpOn(int rank, StampWord word, WaitResult why);
  Status sealed(int rank, uint64_t stamp);
  std::vector<int> gone() const;
  Status lost(int rank, const Evidence& evidence);
  void signalUnmapped(int stampOwner, StampWord word, uint64_t stamp,
                      std::span<const std::byte> data = {});
  void ringMapped();
  std::string title() const;

  Group& group_;
  const Call call_;
  const Deadline deadline_;
  Waiter waiter_;
  uint64_t number_;
  Slot* own_;
  uint64_t sealKind_;  // what our stamps say when we end early: because of us, or of a loss
  int begunSeen_ = 0;  // ranks below this have begun and agree with our call
  bool opened_ = false;
  bool committed_ = false;
};

// Fetches of one operation that are waited for together. None of them touches its target any more
// when this object is gone.
class Fetches {
 public:
  explicit Fetches(Operation& op) : op_(op), completion_(&op.group().window().bell()) {}
  ~Fetches();
  Fetches(const Fetches&) = delete;
  Fetches& operator=(const Fetches&) = delete;

  // The region must be one that the rank announced.
  Status start(int rank, const RemoteRegion& region, uint64_t offset, std::span<std::byte> target);
  Status await();

 private:
  // A fetch could not begin or end: the group is over here. Names who is gone, where that is why.
  Status broken(Error why);

  Operation& op_;
  Completion completion_;
};

}  // namespace mooncake
