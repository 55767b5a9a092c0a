#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/callbacks.h"
#include "backend/errors.h"
#include "backend/profile.h"
#include "base/mutex.h"
#include "base/result.h"
#include "group/call.h"
#include "group/flush_agent.h"

namespace mooncake {

class CollectiveQueue;
class Completions;

// How a collective ended.
struct Ending {
  Status status;
  std::shared_ptr<Loss> loss;             // null, or the loss whose error `status` is
  std::shared_ptr<const GroupView> view;  // the contributors; null: it never ran
  // The view of the operation before it, if that was another one.
  std::shared_ptr<const GroupView> before;
};

// A collective that was called: done or not, and how it ended.
class CollectiveWork : public c10d::Work {
 public:
  // `size`: ranks of the group, which may grow to `capacity`. `key`: see CompletionHooks.
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
  // The same, while it is not handed to the program yet.
  std::exception_ptr heldException() const;
  // Returns when the operation has ended. Without a timeout of its own the caller runs queued
  // operations itself if no other thread does. With a timeout it only waits, and raises if the
  // operation takes longer; the operation goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_; }

  bool finished() const { return finished_.load(std::memory_order_acquire); }
  std::string describe() const;  // "ALLREDUCE #7 on rank 0"

  // Ranks of the group, ascending. Empty, and epoch 0, until the operation has finished.
  std::vector<int> contributors() const;
  std::vector<int> failedRanks() const;  // all other ranks
  std::vector<int> lostRanks() const;    // failed ranks that contributed to the operation before
  uint64_t epoch() const;                // epoch of the job's view
  // The operation ended with a loss that the program has seen, here or in another operation.
  bool isLossSeen() const { return finished() && ending_.loss && ending_.loss->isSeen(); }
  int capacity() const { return capacity_; }
  // Ends the call's event for torch's profiler, if the end of the operation has not done so.
  void endProfile();
  // Without `override`: c10d::Work has it since torch 2.15 only.
  uint64_t getCompletionKey() const { return key_; }
  CallbackOrigin origin() const;
  // The completions of the group's engine.
  const std::shared_ptr<Completions>& completions() const;
  // The moment of its end, in the order of callbacks.
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
  // Set when the work is submitted, which another thread may do later.
  std::atomic<uint64_t> number_ = 0;
  std::atomic<uint64_t> era_ = 0;  // era of the queue
  uint64_t position_ = 0;          // see CollectiveQueue::number()
  bool isCounted_ = false;         // the position counts the call
  CalledFrom calledFrom_ = CalledFrom::kProgram;
  // Kept alive here, because a waiting caller may be the last user. Null: the work was made
  // finished.
  const std::shared_ptr<CollectiveQueue> queue_;
  const std::vector<at::Tensor> outputs_;
  Ending ending_;
  std::atomic<bool> finished_{false};
  std::atomic<bool> isProfileEnded_{false};
  std::atomic<Callbacks::Moment> endMoment_{Callbacks::kNever};
  Mutex futureMutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ GUARDED_BY(futureMutex_);
};

}  // namespace mooncake
