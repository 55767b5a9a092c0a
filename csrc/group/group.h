#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/mutex.h"
#include "base/rank_list.h"
#include "base/wait.h"
#include "engine/engine.h"
#include "engine/rendezvous/store.h"
#include "engine/window.h"
#include "group/flush_agent.h"
#include "group/group_env.h"
#include "group/group_state.h"
#include "group/slot.h"
#include "membership/member_exchange.h"

namespace mooncake {

struct GroupOptions {
  std::string name;  // for messages
  int rank = 0;
  int size = 1;
  // Number of ranks that programs see; 0: all. The ranks from there on are out, and have room to come.
  int extent = 0;
  // Of the members, in rank order; Roster::kNobody: none has come. Empty: ranks are global ranks.
  std::vector<int> globalRanks;
  std::vector<int> jobRanks;  // the same in the job; empty: as globalRanks says
  GroupEnv env;               // the same on all members
  size_t slotBytes = 0;       // least bytes of a slot's payload; 0: as the environment says
  size_t pushBytes = 0;       // of the words for one rank's pushes: ep/layout.h
  size_t mailboxBytes = 0;    // of one mailbox: collectives/mailbox.h; 0: no messages
  // Bell of the group that this one follows. Null: this group begins a line.
  std::shared_ptr<LineBell> bell;
  bool raises = false;  // mode `raise`: the loss of a member ends one operation on all survivors
  // Of a group that begins a job: its first ranks, which begin it; 0: all.
  int founders = 0;
  // Of a group that begins a job: what a process must have in common with it to take the place of a
  // lost rank. Null: no process can.
  std::optional<JobIdentity> identity;
  // Called with the members that are in: when the group is made, and whenever a member is lost. Any
  // thread.
  std::function<void(const GroupView&)> onView;
  // Called once, when the series has ended on this rank: see Renewal::hasEnded(). Any thread, also
  // the engine's: it neither waits nor destroys the group. Takes no lock of the group's.
  std::function<void(const SeriesClose&)> onSeriesEnd;
};

// Ranks that call operations together. They share a window and a count of operations. The caller
// runs the operations of a group one after the other; point-to-point runs beside them.
class Group final : public FlushOwner {
 public:
  // The three functions that make a group are collective: every member calls the same one. This one
  // begins a job with all of its ranks. They meet in the store, which may be gone afterwards.
  static Result<std::unique_ptr<Group>> create(std::shared_ptr<Engine> engine, Store& store,
                                               GroupOptions options, Deadline deadline);
  // The same without a store: `exchange` passes this rank's bytes to all ranks, and returns the
  // bytes of all, by rank. It is called once. A rank that cannot make the group passes its error,
  // and `exchange` then returns an error, which has to be the same on all ranks.
  using Exchange = std::function<Result<std::vector<Bytes>>(const Result<Bytes>& mine)>;
  static Result<std::unique_ptr<Group>> create(std::shared_ptr<Engine> engine,
                                               const Exchange& exchange, GroupOptions options,
                                               Deadline deadline);
  // The endpoint of an engine (Engine::endpoint) in what a rank of a job has published in the store.
  static Result<Bytes> endpointIn(ByteView published);
  // What a process that joins the job publishes there.
  static Bytes publishedBy(const Engine& engine);
  static constexpr const char* kPublished = "members";  // name of the exchange in the store
  // Makes a group of ranks of a job. A rank that is out of the job, or is lost meanwhile, keeps its
  // number in the group and takes no part. `roster`: of a group whose members make this one. A
  // process that has joined the job since takes no part either. Null: the present roster.
  static Result<std::unique_ptr<Group>> createWithin(
      std::shared_ptr<Membership> job, GroupOptions options, Deadline deadline,
      std::shared_ptr<const Roster> roster = nullptr);
  // The same over two topics that no other group has: see topicsOf(). Its members are those of
  // `roster`; null: of the present one.
  using Topics = std::pair<uint64_t, uint64_t>;
  // kInterrupted: `stop` was set while the members met.
  static Result<std::unique_ptr<Group>> createOn(std::shared_ptr<Membership> job,
                                                 GroupOptions options, Topics topics,
                                                 std::shared_ptr<const Roster> roster,
                                                 Deadline deadline,
                                                 const StopSignal* stop = nullptr);
  ~Group() override;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  int extent() const { return options_.extent > 0 ? options_.extent : options_.size; }
  const std::string& name() const { return options_.name; }
  const GroupEnv& env() const { return options_.env; }
  Engine& engine() const { return window_->engine(); }
  const Window& window() const { return *window_; }
  // The window of the mailboxes: [rank] of `mailboxBytes`. Null: the group has none. It may outlive
  // the group, because messages cross from one group to its successor.
  const std::shared_ptr<Window>& mailboxes() const { return mailboxes_; }
  // The bell of the group's line: GroupOptions::bell of a successor.
  const std::shared_ptr<LineBell>& bell() const { return window_->line(); }
  const PartLayout& layout() const { return layout_; }
  // True if all ranks are mapped here and are more than the cores: a waiting thread yields its
  // core.
  bool isCrowded() const { return isCrowded_; }
  size_t slotBytes() const { return slotBytes_; }    // of a slot's payload
  size_t eagerBytes() const { return eagerBytes_; }  // most bytes that all ranks exchange in slots
  // "rank 3", and "rank 3 (global rank 7)" where they differ.
  std::string nameRank(int rank) const { return nameRanks(std::span(&rank, 1)); }
  std::string nameRanks(std::span<const int> ranks) const;

  // Topic of the flush's messages; point-to-point uses the next one. The same on all ranks.
  uint64_t topic() const { return topic_; }

  Waiter waiter(Deadline deadline) const override;
  SpinPolicy spin() const { return spin_; }  // of waiter()
  // Null unless all ranks are mapped. Only for the thread that runs the operation.
  RankCores* cores() { return window_->fullyMapped() ? &cores_ : nullptr; }
  // Ends every wait of this group, and refuses every later operation with this error. The first
  // call wins. Any thread.
  void fail(Error why) override;
  void ring() const override;
  // Interrupts every wait of this group.
  void interruptAll() override;
  // Waits until every rank that may need us for the last operation has ended it, or is gone. Then
  // our engine may go, too. The group is not used afterwards.
  void leave(Deadline deadline);
  // Only waits, at the end of the program: Engine::leave() tells the whole job.
  void awaitEnded(Deadline deadline);
  // Ok, or the error of fail(), or the error with which the membership is over.
  Status usable() const override;

  const std::shared_ptr<Membership>& membership() const { return membership_; }
  // The processes that the group was made of.
  const std::shared_ptr<const Roster>& roster() const { return roster_; }
  FlushAgent& agent() const { return *agent_; }
  // How this group ends its series, to go on in a successor.
  Renewal& renewal() const { return agent_->renewal(); }
  void onView(const GroupView& view) override;
  // Sets the function that is called after a connection was made again: earlier puts to that rank
  // may be lost. It runs on the loop's thread, under a lock that this call takes, too. So the old
  // function is not called any more when this call has returned.
  void watchReconnects(std::function<void(int rank)> watcher);
  void onReconnected(int rank) override;
  void onSeriesEnd(const SeriesClose& close) override;
  // True if the rank is disconnected, or the job goes on without it. Nothing comes from it any
  // more.
  bool isGone(int rank) const;
  // True if the last view is without the rank, which activeRanks() shows then.
  bool isOut(int rank) const { return isOut_[rank].load(std::memory_order_acquire); }
  std::string whyGone(int rank) const;
  // The number of the last operation that the rank has ended. Only for ranks that we map.
  std::atomic<uint64_t>& endedWord(int rank) const;
  std::atomic<uint64_t>* endedWordOf(int rank) const override;
  // Copies the slot that a rank has published in this operation, for a rank that is behind. Returns
  // nothing if it has not come, is overwritten, or is split.
  std::optional<SlotCopy> copyPart(uint64_t number, int of) const override;
  void putPart(const SlotCopy& copy, int to) const override;

  // Memory that lasts from one operation to the next; its contents do not. Peers read results in
  // the shared block until they have begun the next operation. So a later operation calls shared()
  // after its awaitAllBegun().
  struct Shared {
    std::byte* data = nullptr;
    RemoteRegion region;
    uint64_t offset = 0;  // in the arena: Window::peerArena()
  };
  // Lives as long as the group, and after it until no peer can read it any more.
  Result<Shared> reserve(size_t bytes);
  Result<Shared> shared(size_t bytes);       // peers can fetch from it
  Result<std::byte*> undo(size_t bytes);     // where an operation keeps data as it was
  Result<std::byte*> scratch(size_t bytes);  // small, stays in the cache
  // True: all of these are registered with network cards as long as the group lives. Cards can read
  // them, and can write fetched data to scratch.
  bool usesCards() const { return usesCards_; }

  std::span<const std::byte*> sources();  // one pointer per rank

  uint64_t lastNumber = 0;                    // of the last operation of this group
  std::shared_ptr<const GroupView> lastView;  // contributors of the last operation
  // True: the last operation ended with kInputsLost, and its cause is not the loss of a rank.
  bool lostInputsOnly = false;
  // Number of calls since the last loss, or since the group began. 0: not counted. Ranks compare it
  // in mode `raise`, or once hasMismatched.
  uint64_t callsSinceLoss = 0;
  CalledFrom calledFrom = CalledFrom::kProgram;  // the operation that runs
  // Further operations of the call follow the operation that runs, see CallOfSeveral.
  bool goesOn = false;
  // An operation has ended as a mismatch, as it did on all ranks. From then on ranks compare numbers
  // of calls and CalledFrom, because later calls may be shifted.
  bool hasMismatched = false;
  bool comparesCounts() const { return options_.raises || hasMismatched; }
  // The last operation that ended well here. All ranks of lastView had begun it themselves then.
  // The end of an operation alone does not prove that: an agent also ends operations for a caller
  // that is late.
  uint64_t lastBegun = 0;

 private:
  // Data about the members, once they have met.
  struct Meeting;
  static std::vector<int> jobRanksOf(const GroupOptions& options);
  static Result<std::unique_ptr<Group>> prepare(std::shared_ptr<Engine> engine,
                                                GroupOptions options);
  Result<Meeting> meet(const Exchange& exchange, Deadline deadline);
  Result<Meeting> meetInJob(MemberExchange::Options place, uint64_t topic, Deadline deadline,
                            const StopSignal* stop);
  Bytes describePart() const;
  // A member's parts of our windows.
  struct Parts {
    Bytes window;     // empty: it is out of the job
    Bytes mailboxes;  // empty: no messages
  };
  Result<Parts> takePart(ByteReader& in, int rank) const;
  Error withoutRoom(Error why, size_t arenaBytes) const;
  Status start(Meeting meeting);
  Status beginJob(Deadline deadline);
  Group(GroupOptions options, PartLayout layout, size_t slotBytes, size_t eagerBytes)
      : options_(std::move(options)),
        layout_(layout),
        slotBytes_(slotBytes),
        eagerBytes_(eagerBytes) {}

  Result<RetiredMemory> allocate(size_t bytes) const;

  // Grows when needed, to powers of two.
  struct PrivateBlock {
    std::unique_ptr<std::byte, void (*)(void*)> data{nullptr, nullptr};
    size_t bytes = 0;
    MemoryRegion region;  // its registration with the cards, if any; ends before the memory
  };
  Result<std::byte*> atLeast(PrivateBlock& block, size_t wanted, uint32_t rights);

  GroupOptions options_;
  PartLayout layout_;
  size_t slotBytes_;
  size_t eagerBytes_;
  std::unique_ptr<Window> window_;
  std::shared_ptr<Window> mailboxes_;
  SpinPolicy spin_;
  RankCores cores_;
  bool isCrowded_ = false;
  bool usesCards_ = false;
  uint64_t topic_ = 0;
  std::atomic<bool> failed_{false};
  mutable Mutex failureMutex_;
  Status failure_ GUARDED_BY(failureMutex_);
  std::shared_ptr<Membership> membership_;
  std::shared_ptr<const Roster> roster_;
  std::unique_ptr<MemberExchange> exchange_;  // null: the group is a whole job
  std::shared_ptr<FlushAgent> agent_;
  Mutex reconnectMutex_;
  std::function<void(int)> onReconnected_ GUARDED_BY(reconnectMutex_);
  std::unique_ptr<std::atomic<bool>[]> isOut_;  // by rank: out of the job's view
  std::vector<RetiredMemory> reserved_;
  RetiredMemory shared_;
  PrivateBlock undo_;
  PrivateBlock scratch_;
  // Blocks that are too small by now. To free one, its keys would have to be revoked at cards that
  // peers reach.
  std::vector<PrivateBlock> outgrown_;
  std::vector<const std::byte*> sources_;
  std::unique_ptr<ListedGroup> listed_;
};

}  // namespace mooncake
