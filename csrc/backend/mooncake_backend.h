#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/version.h>

#include "backend/active_ranks.h"
#include "backend/backend_options.h"
#include "backend/coalescing.h"
#include "backend/collective_queue.h"
#include "backend/completion_hooks.h"
#include "backend/completions.h"
#include "backend/device/message_staging.h"
#include "backend/device/staged_feed.h"
#include "backend/device/staging.h"
#include "backend/job.h"
#include "backend/message_driver.h"
#include "backend/message_work.h"
#include "backend/rank_evidence.h"
#include "backend/tensors.h"
#include "base/fork.h"
#include "collectives/collectives.h"
#include "group/group.h"
#include "group/group_env.h"

// torch has no macro of its own for hooks at the end of an operation.
#if defined(C10D_BACKEND_HAS_HOOKS) && (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)
#define MOONCAKE_HAS_COMPLETION_HOOKS
#endif

namespace mooncake {

class RecordedCalls;

// A c10d backend over one Group. Checks arguments, hands them to the collectives, and nothing else.
class MooncakeBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Collective over the group. Blocks until all members are there, at most for options.timeout.
  // With `world` the group shares the engine of that group, which must contain all members.
  MooncakeBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  BackendOptions options, const MooncakeBackend* world);
  ~MooncakeBackend() override;

  const std::string getBackendName() const override { return options_.name; }
  // The options that a split-off group starts with; the copy is the caller's. This function and
  // setTimeout() have no `override`: c10d::Backend has both since torch 2.9 only.
  c10::intrusive_ptr<Options> getBackendOptions();
  // Whether later calls can succeed, and why not.
  c10d::ErrorType getError() override;
  void setTimeout(std::chrono::milliseconds timeout) { options_.timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  // Leaves in good order. Waits until all calls have ended, here and on ranks that need our memory
  // for them, at most for failure_timeout. Every later call is refused. The group that the job
  // began with also leaves all other groups of the job, even if the caller still holds them, and
  // says goodbye to the peers. Its ranks other than 0 first wait a moment until rank 0 has gone.
  void shutdown() override;
  // Leaves the group and gives everything back: joins the threads; the engine goes with its last
  // group. Waits for the completion thread, which may wait for Python's lock: do not hold that
  // lock. Nothing may be called afterwards. A forked child leaves everything as it is: the threads
  // are the parent's.
  void close();
  // Leaves this group only: the first half of shutdown(), and for each group when the process ends.
  // Returns false if the group was not usable any more. With kFailed it waits for no other rank.
  bool leaveGroup(Farewell::How how = Farewell::How::kDestroyed);
  // At the end of the process: leaves all groups that share the engine, and says goodbye to the
  // peers. Nothing is received afterwards. Waits for the completion thread, at most for
  // failure_timeout.
  void leaveJob(const Farewell& farewell);
  // Ends everything that is under way with an error.
  void abort() override;
#ifdef C10D_BACKEND_HAS_HOOKS
  // The hook is called at the beginning of abort(), on its thread.
  bool supportsAbortHooks() const override { return true; }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#ifdef MOONCAKE_HAS_COMPLETION_HOOKS
  // The hook is called for collectives, messages, and calls of windows: see CompletionHooks.
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  // With a tensor, the call is collective and registers the tensor.
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
  // Makes a group of the same ranks in the same job, for operations of another module. Collective
  // over the group. Throws.
  // `onView`: see GroupOptions.
  std::unique_ptr<Group> makeGroup(const std::string& purpose, size_t slotBytes,
                                   size_t mailboxBytes, bool raises, Deadline deadline,
                                   std::function<void(const GroupView&)> onView = {}) const;
  // Allocates a tensor in memory that the ranks of the host can map. This function and the next
  // have no `override`: torch has them in this form since 2.9, or somewhat before. The device index
  // of the CPU is -1.
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
  // Raises on every rank, and names the ranks that did not come in time: the first one, or all.
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
  // Messages that are called between the two are kept, and then posted together, unless one of them
  // was refused. Collectives begin as always. endCoalescing() returns one work for all calls. Calls
  // of other threads are not part of the batch.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  // Brings the tensor up to date.
  at::Tensor activeRanks() const;
  at::Tensor activeRanksOnHost() const { return activeRanks_->onHost(); }
  // Returns a function that brings `activeRanks` on a device up to date, once the group's view has
  // none but these ranks.
  std::function<void(uint64_t active)> showLoss() const {
    return [ranks = activeRanks_](uint64_t active) { ranks->pushAfter(active); };
  }
  // Options for a group of these ranks of this group; the list is the new group's rank order.
  BackendOptions optionsOfSplit(const std::vector<int>& ranks, const Options& opts) const;
  // Options for a group that this one is merged into. Only used while this group lives.
  BackendOptions optionsOfMerge(const Options& opts) const;
  // Options have a group name since torch 2.9. Older versions split no groups.
  template <typename GivenOptions>
  static std::string groupNameIn(const GivenOptions& opts) {
    if constexpr (requires { opts.group_name; }) return opts.group_name;
    return {};
  }
  const BackendOptions& options() const { return options_; }
  const char* onFailure() const { return options_.raises ? "raise" : "continue"; }
  uint64_t epoch() const;  // of the job's view
  std::vector<RankEvidence> evidence() const;
  // Ranks that are in the last view, as activeRanks() shows them, and have not left the group.
  std::vector<int> survivors() const;
  // See CollectiveQueue::acknowledgeLoss().
  bool acknowledgeLoss();
  // Throws the error of every later call, if this rank is out of the job.
  void checkStanding() const;
  // Throws the error of send() or recv() for these arguments, if they are wrong on any device.
  void checkMessage(c10d::OpType type, const std::vector<at::Tensor>& tensors, int peer,
                    int tag) const;
  // Describes the state of the group in words: see describeState().
  std::string state() const;
  // "shm", "tcp", ...: the wire to a rank.
  std::string transportTo(int rank) const;

 protected:
  // Waits until work of devices that no operation on the host waits for has ended, or for the
  // deadline. Called when this rank leaves the group.
  virtual void drainDevice(Deadline) {}
  // The batch of the calling thread; null outside of one.
  std::shared_ptr<Coalescing::Batch> openBatch() { return coalescing_.current(); }
  // Runs a call that torch makes between startCoalescing() and endCoalescing(). Keeps its error for
  // endCoalescing(), which raises it and so ends the batch.
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
  Group& group() { return *group_; }
  // The calls that graphs have; null: none has any. They stop with the group.
  RecordedCalls* recordedCalls() const { return recordedCalls_; }
  void use(std::unique_ptr<RecordedCalls> calls);
  // Whether no operation runs or waits for its turn.
  bool isIdle() { return queue_->drain(Deadline::after(Clock::duration::zero())); }
  void refuseInForkedChild() const;
  // Returns the group's timeout for kUnsetTimeout.
  std::chrono::milliseconds effective(std::chrono::milliseconds timeout) const;

 private:
  static constexpr const char* kDestroyed = "the process group was destroyed";

  GroupOptions groupOptions() const;
  std::vector<MergeMember> mergeMembers() const;
  // Operations that can take their data as it comes have a feed as their argument.
  template <typename Run>
  static Status runOn(const Run& run, InputFeed* feed) {
    if constexpr (std::is_invocable_v<const Run&, InputFeed*>)
      return run(feed);
    else
      return run();
  }
  template <typename Run>
  WorkPtr submit(c10d::OpType type, at::TensorList inputs, std::vector<at::Tensor> outputs,
                 bool async, Run&& run) {
    refuseInForkedChild();
    auto work = c10::make_intrusive<CollectiveWork>(
        rank_, size_, options_.capacity, type, queue_, std::move(outputs),
        profileOf(options_.name, type, inputs), hooks_->newKey());
    const auto staging = Staging::takeCurrent();
    if (!staging) {
      auto plain = [run = std::forward<Run>(run)] { return runOn(run, nullptr); };
      if (recordedCalls_) {
        std::lock_guard order(orderMutex_);
        follow(work, nullptr, std::move(plain));
      } else {
        queue_->submit(work, async, std::move(plain));
      }
    } else if (staging->mode() == Staging::Mode::kRecords) {
      staging->mark();
      work->endProfile();
    } else {
      // No other call may come between the mark and the place in the queue.
      std::unique_lock order(orderMutex_, std::defer_lock);
      const bool isReplay = staging->mode() == Staging::Mode::kReplays;
      const auto turn = std::make_shared<StagedTurn>(staging);
      auto inTurn = [this, turn, staging, run = std::forward<Run>(run)] {
        return turn->run(*group_, [&] {
          StagedFeed feed(staging, *group_);
          Status status = runOn(run, staging->isCut() ? &feed : nullptr);
          activeRanks_->push();  // ahead of the outputs
          return status;
        });
      };
      if (!isReplay && (staging->isOrdered() || recordedCalls_)) order.lock();
      if (!isReplay && recordedCalls_) {
        follow(work, staging.get(), std::move(inTurn));
      } else {
        staging->mark();
        queue_->submit(work, !isReplay && (async || staging->isOrdered()), std::move(inTurn));
      }
    }
    if (const auto batch = coalescing_.current()) batch->works.push_back(work);
    return work;
  }
  // Submits a call once it has its place in the order of calls and replays. Null: it has no staging.
  void follow(const c10::intrusive_ptr<CollectiveWork>& work, Staging* staging,
              CollectiveQueue::Run run);
  friend class TorchWindow;
  void runAbortHooks();
  PointToPoint::OnDone tellingOf(uint64_t key) const;
  WorkPtr allreduceSparse(const at::Tensor& tensor, const c10d::AllreduceOptions& opts);
  WorkPtr post(c10d::OpType type, std::vector<at::Tensor>& tensors, int peer, int tag);
  std::shared_ptr<MessageMemory> memoryOf(const at::Tensor& tensor) const;
  c10::intrusive_ptr<MessageWork> start(c10d::OpType type, std::shared_ptr<MessageMemory> memory,
                                        int peer, int tag,
                                        const std::shared_ptr<MessageStaging>& staging);
  void settleWhenFinished(const c10::intrusive_ptr<MessageWork>& work,
                          const std::shared_ptr<MessageStaging>& staging);
  const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* operation) const;
  void leakAll();
  int jobRank(int rank) const;
  int root(int64_t root, int64_t rootTensor, const char* operation) const;
  Deadline deadline(std::chrono::milliseconds timeout) const;

  BackendOptions options_;
  std::shared_ptr<ActiveRanks> activeRanks_;
  Coalescing coalescing_;
  // Held from the mark of an ordered staging to its place in queue_. Recursive, because a mark may
  // wait for a word of the stream, and signal handlers that run then may call operations.
  std::recursive_mutex orderMutex_;
  std::mutex abortHooksMutex_;  // guards abortHooks_; hooks run without it
  std::map<int64_t, std::function<void()>> abortHooks_;
  const uint32_t forkGeneration_ = forkGeneration();
  const bool inOurWorld_;  // made within the job of another group
  std::shared_ptr<Job> job_;
  std::shared_ptr<Completions> completions_;  // the job's
  const std::shared_ptr<CompletionHooks> hooks_ = std::make_shared<CompletionHooks>();
  std::mutex leaveMutex_;  // one leaveGroup() at a time
  std::unique_ptr<Group> group_;
  std::shared_ptr<MessageDriver> messages_;
  std::shared_ptr<CollectiveQueue> queue_;
  std::unique_ptr<RecordedCalls> ownRecordedCalls_;
  std::atomic<RecordedCalls*> recordedCalls_ = nullptr;  // the same, for all threads
};

}  // namespace mooncake
