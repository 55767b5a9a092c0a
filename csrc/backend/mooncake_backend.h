#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/version.h>

#include "backend/coalescing.h"
#include "backend/collective_queue.h"
#include "backend/completion_hooks.h"
#include "backend/completions.h"
#include "backend/merge_store.h"
#include "backend/message_driver.h"
#include "backend/message_work.h"
#include "backend/rank_evidence.h"
#include "backend/tensors.h"
#include "base/env.h"
#include "base/fork.h"
#include "collectives/collectives.h"
#include "engine/engine.h"
#include "group/group.h"

// No macro of torch's tells hooks that come at the end of an operation from those that do not.
#if defined(C10D_BACKEND_HAS_HOOKS) && (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)
#define MOONCAKE_HAS_COMPLETION_HOOKS
#endif

namespace mooncake {

struct BackendOptions {
  std::string name;  // "mooncake" or "mooncake-cpu"
  std::string groupName;
  std::vector<int> globalRanks;
  std::chrono::milliseconds timeout;
  std::optional<std::chrono::milliseconds> messageTimeout;  // none: the same
  bool lostMessagesReturn = false;  // in mode `continue`: see MessageDriver::lostMessagesReturn()
  Env env;
  at::Tensor activeRanks;  // int32, mirrors who is active; the caller's own when one was given
  int capacity = 0;        // ranks that the group may grow to; 0: its size
  // Of somebody else, who uses it, too: a job on it runs under env.jobKey, which is the engine's,
  // and leaves its peers alone at its end. None: the job makes its own.
  std::shared_ptr<Engine> engine;
  // Key of the job's store, without prefixes, under which a launcher names the ranks that died.
  // Empty: no launcher does.
  std::string launcherKey;
  // Of the group that this rank comes from, where groups are merged into this one.
  MergeStore::Members mergeMembers;
};

// A c10d backend over one Group. Checks arguments, hands them to the collectives, and nothing else.
class MooncakeBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Collective over the group; blocks until all are there or options.timeout is over. With `world`
  // the group shares the engine of another one, which must contain all members.
  MooncakeBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  BackendOptions options, const MooncakeBackend* world);
  ~MooncakeBackend() override;

  const std::string getBackendName() const override { return options_.name; }
  // What a group that is split off starts with; the caller's own copy. Without `override`, as
  // setTimeout(): c10d::Backend has both since torch 2.9 only.
  c10::intrusive_ptr<Options> getBackendOptions();
  // Whether later calls can succeed, and why not.
  c10d::ErrorType getError() override;
  void setTimeout(std::chrono::milliseconds timeout) { options_.timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  // Leaves in good order: waits until what was called has ended, here and where others need our
  // memory for it, at most for the failure timeout. Every later call is refused. The group that the
  // job began with takes all other groups of the job with it and says goodbye to the peers, whoever
  // still holds an object of them; the others let rank 0 go first.
  void shutdown() override;
  // shutdown(), and everything is given back: threads are joined, the engine goes with its last
  // group. Waits for the completion thread, which may wait for Python's lock: do not hold that
  // lock. Nothing may be called afterwards. In a forked child all of it is left as it is: the
  // threads that it waits for are the parent's.
  void close();
  // The first half of shutdown(), or the process ends. False: there was nothing to leave any more.
  // Who has failed waits for nobody.
  bool leaveGroup(Farewell::How how = Farewell::How::kDestroyed);
  // Leaves all groups that share the engine, and says goodbye to the peers: nothing is heard of
  // anybody afterwards. The process ends: waits for the completion thread.
  void leaveJob(const Farewell& farewell);
  // Ends everything that is under way with an error.
  void abort() override;
#ifdef C10D_BACKEND_HAS_HOOKS
  // Called at the beginning of abort(), on its thread.
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#ifdef MOONCAKE_HAS_COMPLETION_HOOKS
  // Of collectives, messages, and what windows do: see CompletionHooks.
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  // Collective with a tensor, which is registered at once.
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
  // A group of the same ranks for operations of somebody else's, in the same job. Collective over
  // the group. Throws.
  std::unique_ptr<Group> makeGroup(const std::string& purpose, size_t slotBytes,
                                   size_t mailboxBytes, bool raises, Deadline deadline) const;
  // Of memory that the ranks of a host can map. Both without `override`: torch has them like this
  // since 2.9, or somewhat before. torch passes a device index; for the CPU it is -1.
  at::Tensor allocateTensor(long size, at::TensorOptions options);
  bool supportsTensorAlloc(c10::DeviceIndex index) { return index < 0; }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                        std::vector<int64_t>& inputSplits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  // Raises and names who did not come in time, on every rank; the first one only, or all of them.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  // Several tensors in one operation. They may differ in type.
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                              std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  bool supportsCoalescing() const override { return true; }
  // Between the two, messages are kept, and then posted at once if all of them are right; whatever
  // else is called begins as always. One work for all of it. Calls of other threads are not in it.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  at::Tensor activeRanks() const { return options_.activeRanks; }
  // Of a group of these ranks of ours, which the new one's rank order follows.
  BackendOptions optionsOfSplit(const std::vector<int>& ranks, const Options& opts) const;
  // Of a group that ours is merged into. To be used as long as this group lives.
  BackendOptions optionsOfMerge(const Options& opts) const;
  // Options have it since torch 2.9: nobody splits groups before.
  template <typename GivenOptions>
  static std::string groupNameIn(const GivenOptions& opts) {
    if constexpr (requires { opts.group_name; }) return opts.group_name;
    return {};
  }
  const BackendOptions& options() const { return options_; }
  const char* onFailure() const { return options_.env.raises ? "raise" : "continue"; }
  uint64_t epoch() const;  // of the job's view
  std::vector<RankEvidence> evidence() const;
  // Ranks of the group that the last view counts in, as activeRanks() shows them, and that have not
  // left it.
  std::vector<int> survivors() const;
  // See CollectiveQueue::acknowledgeLoss().
  bool acknowledgeLoss();
  // Throws what every call does once this rank is out of the job.
  void checkStanding() const;
  // Throws what send() and recv() do for such arguments.
  void checkMessage(c10d::OpType type, const std::vector<at::Tensor>& tensors, int peer,
                    int tag) const;
  // What the group is doing, in words: see describeState().
  std::string state() const;
  // "shm", "tcp", ...: the wire to a rank.
  std::string transportTo(int rank) const;

 private:
  static constexpr const char* kDestroyed = "the process group was destroyed";

  GroupOptions groupOptions() const;
  std::vector<MergeMember> mergeMembers() const;
  // Makes engine_ and group_.
  void beginJob(const c10::intrusive_ptr<c10d::Store>& store, Deadline init);
  template <typename Run>
  WorkPtr submit(c10d::OpType type, at::TensorList inputs, std::vector<at::Tensor> outputs,
                 bool async, Run&& run) {
    refuseInForkedChild();
    auto work = c10::make_intrusive<CollectiveWork>(
        rank_, size_, options_.capacity, type, queue_, std::move(outputs),
        profileOf(options_.name, type, inputs), hooks_->newKey());
    queue_->submit(work, async, std::forward<Run>(run));
    if (const auto batch = coalescing_.current()) batch->works.push_back(work);
    return work;
  }
  friend class TorchWindow;
  void runAbortHooks();
  PointToPoint::OnDone tellingOf(uint64_t key) const;
  WorkPtr allreduceSparse(const at::Tensor& tensor, const c10d::AllreduceOptions& opts);
  WorkPtr post(c10d::OpType type, std::vector<at::Tensor>& tensors, int peer, int tag);
  std::shared_ptr<MessageMemory> memoryOf(const at::Tensor& tensor) const;
  c10::intrusive_ptr<MessageWork> start(c10d::OpType type, std::shared_ptr<MessageMemory> memory,
                                        int peer, int tag);
  // What torch itself calls before endCoalescing(): that one raises, and so ends the batch.
  template <typename Call>
  WorkPtr withinBatch(Call&& call) {
    const auto batch = coalescing_.current();
    if (!batch) return call();
    try {
      return call();
    } catch (...) {
      if (!batch->error) batch->error = std::current_exception();
      return nullptr;
    }
  }
  WorkPtr keep(const std::shared_ptr<Coalescing::Batch>& batch, c10d::OpType type,
               const at::Tensor& tensor, int peer, int tag);
  const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* operation) const;
  void waitForRankZerosExit();
  void leakAll();
  void refuseInForkedChild() const;
  int jobRank(int rank) const;
  int root(int64_t root, int64_t rootTensor, const char* operation) const;
  Deadline deadline(std::chrono::milliseconds timeout) const;
  std::chrono::milliseconds effective(std::chrono::milliseconds timeout) const;

  class KeptWork;

  // The groups of this process that share an engine, and so one goodbye.
  struct Job {
    std::mutex mutex;  // guards groups, while they leave, too
    std::set<MooncakeBackend*> groups;
    std::atomic<bool> hasLeft{false};
  };
  void leaveOthersOfJob(Farewell::How how);
  void sayGoodbye(const Farewell& farewell);

  BackendOptions options_;
  Coalescing coalescing_;
  std::mutex abortHooksMutex_;  // guards abortHooks_; hooks run without it
  std::map<int64_t, std::function<void()>> abortHooks_;
  const uint32_t forkGeneration_ = forkGeneration();
  const c10::intrusive_ptr<c10d::Store> rankZeroStore_;  // what waitForRankZerosExit() waits for
  const bool inOurWorld_;  // a group of a job that the default group of ours is
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Completions> completions_;
  const std::shared_ptr<CompletionHooks> hooks_ = std::make_shared<CompletionHooks>();
  std::shared_ptr<Membership> membership_;  // of the job; all its groups share it
  const std::shared_ptr<Job> job_;
  std::mutex leaveMutex_;  // leaveGroup()
  std::unique_ptr<Group> group_;
  std::shared_ptr<MessageDriver> messages_;
  std::shared_ptr<CollectiveQueue> queue_;
};

}  // namespace mooncake
