#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace mooncake {

class Completions;

// Several works as one. It ends when all of them have ended, with their first error.
class BatchWork : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // `capacity`: ranks that the group may grow to.
  BatchWork(int rank, int capacity, std::vector<WorkPtr> works)
      : Work(rank, c10d::OpType::COALESCED), capacity_(capacity), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Waits for all of them, also if one fails. Afterwards their memory is the caller's again.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // In the order of the calls.
  const std::vector<WorkPtr>& works() const { return works_; }
  // Ranks that any of the works has lost, ascending.
  std::vector<int> lostRanks() const;
  int capacity() const { return capacity_; }
  // The completion thread of the works; null: there are no works.
  std::shared_ptr<Completions> completions() const;

 private:
  const int capacity_;
  const std::vector<WorkPtr> works_;
};

}  // namespace mooncake
