#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/callbacks.h"
#include "backend/errors.h"
#include "backend/profile.h"
#include "base/result.h"
#include "group/call.h"
#include "group/flush_agent.h"

namespace mooncake {

class CollectiveQueue;
class Completions;

// How a collective ended.
struct Ending {
  Status status;
  std::shared_ptr<Loss> loss;             // `status` is its error
  std::shared_ptr<const GroupView> view;  // who contributed; null: it never came to that
  // The view of the operation before it, where it was another one.
  std::shared_ptr<const GroupView> before;
};

// A collective that was called: done or not, and how it ended.
class CollectiveWork : public c10d::Work {
 public:
  // `size`: of the group, which may grow to `capacity`. `key`: see CompletionHooks.
  CollectiveWork(int rank, int size, int capacity, c10d::OpType type,
                 std::shared_ptr<CollectiveQueue> queue, std::vector<at::Tensor> outputs,
                 const Profile& profile, uint64_t key)
      : Work(rank, type, profile.title(), profile.inputs),
        size_(size),
        capacity_(capacity),
        key_(key),
        queue_(std::move(queue)),
        outputs_(std::move(outputs)) {}

  bool isCompleted() override { return finished(); }
  bool isSuccess() const override { return finished() && ending_.status.ok(); }
  std::exception_ptr exception() const override;
  // Ends when the operation has; helps it along when nobody does. With a timeout of its own it only
  // waits, and raises when the operation takes longer, which goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_; }

  bool finished() const { return finished_.load(std::memory_order_acquire); }
  std::string describe() const;  // "ALLREDUCE #7 on rank 0"

  // Ranks of the group, ascending; nobody, and epoch 0, until it is finished.
  std::vector<int> contributors() const;
  std::vector<int> failedRanks() const;  // all others
  std::vector<int> lostRanks() const;    // of those: contributed to the operation before
  uint64_t epoch() const;                // of the job's view
  int capacity() const { return capacity_; }
  // Without `override`: c10d::Work has it since torch 2.15 only.
  uint64_t getCompletionKey() const { return key_; }
  CallbackOrigin origin() const { return {queue_.get(), era_}; }
  // Of the engine to which the group belongs.
  const std::shared_ptr<Completions>& completions() const;
  // When it ended, in the order of callbacks.
  std::atomic<Callbacks::Moment>& endMoment() { return endMoment_; }

 private:
  friend class CollectiveQueue;

  void await(std::chrono::milliseconds timeout);
  void finish(Ending ending, Completions& completions);
  static void mark(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs,
                   const Ending& ending);

  const int size_;
  const int capacity_;
  const uint64_t key_;
  // Set when it is submitted.
  uint64_t number_ = 0;
  uint64_t era_ = 0;        // of the queue
  uint64_t position_ = 0;   // see CollectiveQueue::number()
  bool isCounted_ = false;  // the call is one of those that the position counts
  CalledFrom calledFrom_ = CalledFrom::kProgram;
  // Whoever waits may be the last to use it. Null: was already finished when it was made.
  const std::shared_ptr<CollectiveQueue> queue_;
  const std::vector<at::Tensor> outputs_;
  Ending ending_;
  std::atomic<bool> finished_{false};
  std::atomic<Callbacks::Moment> endMoment_{Callbacks::kNever};
  std::mutex futureMutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace mooncake
