#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/wait.h"
#include "engine/engine.h"
#include "engine/rendezvous/store.h"
#include "engine/window.h"
#include "group/flush_agent.h"
#include "group/group_state.h"
#include "group/slot.h"
#include "membership/member_exchange.h"

namespace mooncake {

struct GroupOptions {
  std::string name;  // for messages
  int rank = 0;
  int size = 1;
  std::vector<int> globalRanks;  // of the members, in rank order; empty: ranks are global ranks
  size_t slotBytes = 0;          // what a slot's payload holds at least; 0: as the environment says
  size_t mailboxBytes = 0;  // of a part, for each rank: what runs beside operations lays it out
  bool raises = false;  // mode `raise`: the loss of a member ends one operation on all survivors
  // Who is in: called once when the group is made and whenever a member is lost, on any thread.
  std::function<void(const GroupView&)> onView;
};

// The ranks that call operations together, and what they share for it: a window and a count of
// operations. Operations of one group run one after the other (the caller sees to that),
// point-to-point beside them.
class Group final : public FlushOwner {
 public:
  // All collective over the group: every member calls it. These begin a job, with all of its
  // ranks, which meet in the store; it may be gone afterwards.
  static Result<std::unique_ptr<Group>> create(std::shared_ptr<Engine> engine, Store& store,
                                               GroupOptions options, Deadline deadline);
  // The same without a store: `exchange` gives what this rank says to all, and returns what all
  // say, by rank. It is called once.
  using Exchange = std::function<Result<std::vector<Bytes>>(const Bytes& mine)>;
  static Result<std::unique_ptr<Group>> create(std::shared_ptr<Engine> engine,
                                               const Exchange& exchange, GroupOptions options,
                                               Deadline deadline);
  // A group of ranks of a job. Those that are out of it are in the group's numbering only, also
  // when they go meanwhile.
  static Result<std::unique_ptr<Group>> createWithin(std::shared_ptr<Membership> job,
                                                     GroupOptions options, Deadline deadline);
  ~Group() override;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::string& name() const { return options_.name; }
  Engine& engine() const { return window_->engine(); }
  const Window& window() const { return *window_; }
  const PartLayout& layout() const { return layout_; }
  // All ranks are mapped here and are more than the cores: whoever waits gives its core away.
  bool isCrowded() const { return isCrowded_; }
  size_t slotBytes() const { return slotBytes_; }    // what a slot's payload holds
  size_t eagerBytes() const { return eagerBytes_; }  // what all ranks exchange in slots at most
  // "rank 3", and "rank 3 (global rank 7)" where they differ.
  std::string nameRank(int rank) const;

  // Of messages of the flush; the one behind it is of point-to-point. The same on all ranks.
  uint64_t topic() const { return topic_; }

  Waiter waiter(Deadline deadline) const override;
  // Null unless all ranks are mapped. For the thread that runs the operation.
  RankCores* cores() { return window_->fullyMapped() ? &cores_ : nullptr; }
  // Any thread: every wait of this group ends and every later operation is refused with this error.
  // The first call wins.
  void fail(Error why) override;
  void ring() const override;
  // Every wait looks up.
  void interruptAll() override;
  // Waits until every rank that may need us for the last operation has ended it, or is gone, so
  // that our engine may go, too. The group is not used afterwards.
  void leave(Deadline deadline);
  // Only waits: the end of the program is told to the whole job (Engine::leave).
  void awaitEnded(Deadline deadline);
  // What fail() said.
  Status usable() const override;

  const std::shared_ptr<Membership>& membership() const { return membership_; }
  FlushAgent& agent() const { return *agent_; }
  void onView(const GroupView& view) override;
  // Whoever else puts into the parts of others is told when what it put may be lost. On the loop's
  // thread, under a lock that this call takes: after it nobody is told the old way any more.
  void watchReconnects(std::function<void(int rank)> watcher);
  void onReconnected(int rank) override;
  // The rank is disconnected, or the job goes on without it: nothing comes from it any more.
  bool isGone(int rank) const;
  std::string whyGone(int rank) const;
  // The number of the last operation that the rank has ended: of a rank that we map.
  std::atomic<uint64_t>& endedWord(int rank) const;
  std::atomic<uint64_t>* endedWordOf(int rank) const override;
  // What we have of a rank's part in this operation; nothing if that has not come, or is
  // overwritten. Given to a rank that is behind.
  std::optional<SlotCopy> copyPart(uint64_t number, int of) const override;
  void putPart(const SlotCopy& copy, int to) const override;

  // Memory that lasts from one operation to the next; contents are not kept. The shared block's
  // results are read by peers until they have begun the next operation, so it is taken after
  // awaitAllBegun() of a later one.
  struct Shared {
    std::byte* data = nullptr;
    RemoteRegion region;
    uint64_t offset = 0;  // in the arena: Window::peerArena()
  };
  // For as long as the group lives. Peers read it as long as they may need it.
  Result<Shared> reserve(size_t bytes);
  Result<Shared> shared(size_t bytes);       // peers can fetch from it
  Result<std::byte*> undo(size_t bytes);     // where an operation keeps data as it was
  Result<std::byte*> scratch(size_t bytes);  // small, stays in the cache
  // Where `usesCards`, network cards know all of these for as long as the group lives, so that they
  // can fetch from there, and to scratch.
  bool usesCards() const { return usesCards_; }

  std::span<const std::byte*> sources();  // one pointer per rank

  uint64_t lastNumber = 0;                    // of the operations of this group
  std::shared_ptr<const GroupView> lastView;  // who contributed to the last one
  // The last operation ended with kInputsLost for an error that is no loss of a rank.
  bool lostInputsOnly = false;
  // Calls since the last loss, to be compared with those of the other ranks; 0: not counted.
  uint64_t callsSinceLoss = 0;
  // The last one that ended well, which all ranks of lastView then had begun themselves: an agent
  // ends operations also for a caller that is late.
  uint64_t lastBegun = 0;

 private:
  // What each rank publishes for the others: of this version of the protocol.
  struct Meeting;
  static Result<std::unique_ptr<Group>> prepare(std::shared_ptr<Engine> engine,
                                                GroupOptions options);
  Result<Meeting> meet(const Exchange& exchange, Deadline deadline);
  Result<Meeting> meetInJob(Deadline deadline);
  Bytes describePart() const;
  Result<Bytes> takePart(ByteReader& in, int rank) const;
  Status start(Meeting meeting);
  Status beginJob(Deadline deadline);
  Group(GroupOptions options, PartLayout layout, size_t slotBytes, size_t eagerBytes)
      : options_(std::move(options)),
        layout_(layout),
        slotBytes_(slotBytes),
        eagerBytes_(eagerBytes) {}

  Result<RetiredMemory> allocate(size_t bytes) const;

  // Grows by need, in powers of two.
  struct PrivateBlock {
    std::unique_ptr<std::byte, void (*)(void*)> data{nullptr, nullptr};
    size_t bytes = 0;
    MemoryRegion region;  // where cards are to know it: ends before the memory
  };
  Result<std::byte*> atLeast(PrivateBlock& block, size_t wanted, uint32_t rights);

  GroupOptions options_;
  PartLayout layout_;
  size_t slotBytes_;
  size_t eagerBytes_;
  std::unique_ptr<Window> window_;
  SpinPolicy spin_;
  RankCores cores_;
  bool isCrowded_ = false;
  bool usesCards_ = false;
  uint64_t topic_ = 0;
  Interrupt interrupt_;
  std::atomic<bool> failed_{false};
  mutable std::mutex failureMutex_;
  Status failure_;
  std::shared_ptr<Membership> membership_;
  std::unique_ptr<MemberExchange> exchange_;  // null: of a whole job
  std::shared_ptr<FlushAgent> agent_;
  std::mutex reconnectMutex_;  // guards onReconnected_
  std::function<void(int)> onReconnected_;
  std::unique_ptr<std::atomic<bool>[]> isOut_;  // by rank: of the job's view
  std::vector<RetiredMemory> reserved_;
  RetiredMemory shared_;
  PrivateBlock undo_;
  PrivateBlock scratch_;
  // Too small by now. Cards that peers reach would have to take their keys back.
  std::vector<PrivateBlock> outgrown_;
  std::vector<const std::byte*> sources_;
  std::unique_ptr<ListedGroup> listed_;
};

}  // namespace mooncake
