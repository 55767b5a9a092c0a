#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/backend_options.h"
#include "backend/completions.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "engine/engine.h"
#include "engine/rendezvous/generation.h"
#include "group/group.h"
#include "membership/join_token.h"

namespace mooncake {

// The groups of this process that share an engine, and with it a membership and one goodbye. Ends
// with the last of them. Errors are thrown.
class Job {
 public:
  // `rank` and `size`: in the group that the job begins with, which may have room for more ranks.
  Job(int rank, int size, const BackendOptions& options);

  // Collective over the job's ranks: makes the engine, unless the options lend one, and the first
  // group. Called once, before all other functions.
  std::unique_ptr<Group> begin(const c10::intrusive_ptr<c10d::Store>& store,
                               const GroupOptions& group, Deadline deadline);
  // Whether a job runs that was begun over this store.
  bool isRunning(const c10::intrusive_ptr<c10d::Store>& store, Deadline deadline) const;
  // In place of begin(), in a new process: becomes a rank of the job that runs, in place of a lost
  // one, or behind the last one. Finds it by the options' token, else in the store. Returns a group
  // with room for all ranks of the job that has this rank alone.
  std::unique_ptr<Group> join(const c10::intrusive_ptr<c10d::Store>& store,
                              const GroupOptions& group, Deadline deadline);
  // A process without which the job went on becomes a rank of it again, with a new engine. It finds
  // the job by the addresses of its last members, without the store. Returns at once if it is in.
  void enterAgain(Deadline deadline) EXCLUDES(enteringMutex_);
  // A group of these ranks that has this one alone: of a process that has not been let in yet, or
  // was taken out. The second does not throw.
  std::unique_ptr<Group> makeAlone(GroupOptions options, Deadline deadline);
  Result<std::unique_ptr<Group>> tryMakeAlone(GroupOptions options, Deadline deadline);
  // Collective over the ranks of the new group, which are members of `parent`.
  std::unique_ptr<Group> makeGroup(const Group& parent, GroupOptions options,
                                   Deadline deadline) const;

  // `leave` is called when another group of the job leaves first; any thread. Groups leave in the
  // order of add(), which is the same on all ranks. In another order on each rank, two ranks could
  // wait for each other in two groups.
  void add(const void* group, std::function<void(Farewell::How)> leave);
  void remove(const void* group);
  // The head ends the job when it leaves: the first group of add(), or a group that took its place.
  bool isHead(const void* group) const { return head_ == group; }
  void moveHead(const void* from, const void* to);
  void leaveOthers(const void* group, Farewell::How how);
  // Waits a moment until rank 0 has gone, because as a rule it holds the server of the store. Until
  // that server has ended, the next init_process_group() at the same address would find it. The
  // first rank of the group is rank 0 of the job.
  void awaitRankZerosExit(const Group& group) const;
  // Tells the peers that this rank leaves the job. A lent engine stays, without its connections to
  // the job's peers.
  void sayGoodbye(const Farewell& farewell);

  // The token by which a process finds this job without the store.
  JoinToken joinToken() const;

  // A name for the line of a group with this first rank and room for so many, the same on all members
  // that make lines in the same order, and of no other line that lives.
  std::string nameLine(const std::string& group, int firstRank, int room);
  void freeLine(const std::string& name);

  // Another one after enterAgain(), and so is the membership.
  std::shared_ptr<Engine> engine() const EXCLUDES(placeMutex_);
  std::shared_ptr<Membership> membership() const EXCLUDES(placeMutex_);
  const std::shared_ptr<Completions>& completions() const { return completions_; }

 private:
  using FindMembers = std::function<std::vector<Bytes>()>;

  JobIdentity identityOf(const GroupOptions& group) const;
  void checkKey(const char* what) const;
  std::shared_ptr<Engine> makeEngine() const;
  Status enter(int size, const FindMembers& members, Deadline deadline) EXCLUDES(placeMutex_);
  std::vector<Bytes> publishedMembers(Deadline deadline) const;
  void publishPlace(Deadline deadline) const;

  const int rank_;
  const int size_;
  const EngineEnv env_;
  const std::shared_ptr<Engine> lent_;
  const std::string launcherKey_;
  const Bytes token_;  // empty: there is none
  std::string id_;     // JobIdentity::job
  JobIdentity identity_;
  Bytes key_;                         // the job's
  std::string routeHint_;             // EngineEnv::routeHint
  MergeStore::Members mergeMembers_;  // until begin()
  // For awaitRankZerosExit() and enterAgain(). Null on rank 0: its server ends when the program drops the store.
  c10::intrusive_ptr<c10d::Store> rankZeroStore_;
  mutable Mutex placeMutex_;
  std::shared_ptr<Engine> engine_ GUARDED_BY(placeMutex_);
  std::shared_ptr<Membership> membership_ GUARDED_BY(placeMutex_);
  Mutex enteringMutex_;  // one enterAgain() at a time
  const std::shared_ptr<Completions> completions_ = std::make_shared<Completions>();
  Mutex aloneMutex_;
  std::shared_ptr<Membership> alone_
      GUARDED_BY(aloneMutex_);  // of this rank alone, once it is needed
  Mutex mutex_;                 // also held while they leave
  std::vector<std::pair<const void*, std::function<void(Farewell::How)>>> groups_
      GUARDED_BY(mutex_);
  std::atomic<const void*> head_{nullptr};
  Mutex linesMutex_;
  std::set<std::string> lines_ GUARDED_BY(linesMutex_);
  std::atomic<bool> hasLeft_{false};
};

}  // namespace mooncake
