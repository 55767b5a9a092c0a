#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/collective_queue.h"
#include "backend/completions.h"
#include "backend/message_driver.h"
#include "backend/rank_evidence.h"
#include "base/env.h"
#include "base/fork.h"
#include "collectives/collectives.h"
#include "collectives/group.h"
#include "engine/engine.h"

namespace mooncake {

struct BackendOptions {
  std::string name;  // "mooncake" or "mooncake-cpu"
  std::string groupName;
  std::vector<int> globalRanks;
  std::chrono::milliseconds timeout;
  Env env;
  at::Tensor activeRanks;  // int32, mirrors who is active; the caller's own when one was given
  int capacity = 0;        // ranks that the group may grow to; 0: its size
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
  // Without `override`: c10d::Backend has it since torch 2.9 only.
  void setTimeout(std::chrono::milliseconds timeout) { options_.timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  // Leaves in good order: waits until what was called has ended, here and where others need our
  // memory for it, at most for the failure timeout. Every later call is refused. In the default
  // group the others let rank 0 go first.
  void shutdown() override;
  // shutdown(), and everything is given back: threads are joined, the engine goes with its last
  // group. Waits for the completion thread, which may wait for Python's lock: do not hold that
  // lock. Nothing may be called afterwards. In a forked child all of it is left as it is: the
  // threads that it waits for are the parent's.
  void close();
  // The first half of shutdown(). False: there was nothing to leave any more.
  bool leaveGroup();
  // The process ends: says goodbye to the peers of all groups that share the engine, which must
  // have been left before: nothing is heard of anybody afterwards.
  void leaveJob();
  // Ends everything that is under way with an error.
  void abort() override;

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
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  at::Tensor activeRanks() const { return options_.activeRanks; }
  const char* onFailure() const { return options_.env.raises ? "raise" : "continue"; }
  uint64_t epoch() const;  // of the job's view
  std::vector<RankEvidence> evidence() const;
  // "shm", "tcp", ...: the wire to a rank.
  std::string transportTo(int rank) const;

 private:
  template <typename Run>
  WorkPtr submit(c10d::OpType type, std::vector<at::Tensor> outputs, bool async, Run&& run);
  WorkPtr post(c10d::OpType type, std::vector<at::Tensor>& tensors, int peer, int tag);
  const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* operation) const;
  void outlastRankZero();
  void refuseInForkedChild() const;
  int jobRank(int rank) const;
  int root(int64_t root, int64_t rootTensor) const;
  Deadline deadline(std::chrono::milliseconds timeout) const;
  std::chrono::milliseconds effective(std::chrono::milliseconds timeout) const;

  BackendOptions options_;
  const uint32_t forkGeneration_ = forkGeneration();
  const c10::intrusive_ptr<c10d::Store> rankZeroStore_;  // what outlastRankZero() waits for
  const bool inOurWorld_;  // a group of a job that the default group of ours is
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Completions> completions_;
  std::shared_ptr<Membership> membership_;  // of the job; all its groups share it
  std::unique_ptr<Group> group_;
  std::shared_ptr<MessageDriver> messages_;
  std::unique_ptr<CollectiveQueue> queue_;
};

}  // namespace mooncake
