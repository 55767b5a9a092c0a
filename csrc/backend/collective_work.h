#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/result.h"

namespace mooncake {

class CollectiveQueue;
class Completions;

// A collective that was called: done or not, and how it ended.
class CollectiveWork : public c10d::Work {
 public:
  CollectiveWork(int rank, c10d::OpType type, uint64_t number, CollectiveQueue* queue,
                 std::vector<at::Tensor> outputs)
      : Work(rank, type), number_(number), queue_(queue), outputs_(std::move(outputs)) {}

  bool isCompleted() override { return finished(); }
  bool isSuccess() const override { return finished() && status_.ok(); }
  std::exception_ptr exception() const override;
  // Ends when the operation has; helps it along when nobody does. With a timeout of its own it only
  // waits, and raises when the operation takes longer, which goes on.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_; }

  bool finished() const { return finished_.load(std::memory_order_acquire); }
  void finish(Status status, Completions& completions);

 private:
  static void mark(c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs,
                   const Status& status);

  const uint64_t number_;
  CollectiveQueue* const queue_;  // null: was already finished when it was made
  const std::vector<at::Tensor> outputs_;
  Status status_;
  std::atomic<bool> finished_{false};
  std::mutex futureMutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace mooncake
