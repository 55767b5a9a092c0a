#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/device/group_streams.h"
#include "backend/device/kernel_end.h"
#include "backend/device/unseen_errors.h"
#include "base/deadline.h"
#include "peers/peer_collectives.h"

namespace mooncake {

// An operation that a kernel does. Its error is raised by wait(), if it is known by then, and else
// by later calls of the group.
class KernelWork final : public c10d::Work {
 public:
  struct Operation {
    uint64_t number;
    int root;                      // without this rank the operation fails; -1: any may be lost
    bool hasSplits;                // it fails if they do not fit other ranks' splits
    bool blocksHost;               // wait() waits on the host
    UnseenErrors::Unseen earlier;  // of another operation; wait() raises it if nobody has
  };
  // The kernel is the last work on the stream of `streams` for collectives.
  // `capacity`: see BackendOptions.
  KernelWork(int rank, c10d::OpType type, int capacity, std::shared_ptr<PeerCollectives> peers,
             Operation operation, std::shared_ptr<GroupStreams> streams,
             std::vector<at::Tensor> outputs);
  ~KernelWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // The error of an operation that ends without its root, or with splits that do not fit; null: it
  // has none. Does not hand it to the program.
  std::exception_ptr ownError() const;
  // Set when the program has seen that error.
  const UnseenErrors::Flag& isRaised() const { return isRaised_; }
  // Makes the current stream of the device wait for the outputs. Waits on the host for barriers, and
  // if it was made so. Only then `timeout` counts.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  // Without `override`: c10d::Work has it since torch 2.9 only.
  void blockCurrentStream() { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return operation_.number; }
  // How the operation has ended, as CollectiveWork says it. Waits on the host for the end of its
  // kernel. No ranks and epoch 0: the group has ended before.
  struct Verdict {
    std::vector<int> contributors, failedRanks, lostRanks;
    uint64_t epoch = 0;
  };
  Verdict verdict() const;
  int capacity() const { return capacity_; }
  // Complete at once. Its callbacks run on a stream that waits for the outputs. It raises the error
  // of an earlier operation that nobody has raised.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  bool isRootLost() const;
  bool awaitKernel() const;
  std::exception_ptr takeEarlier() const;

  const int capacity_;
  const std::shared_ptr<PeerCollectives> peers_;
  const Operation operation_;
  const std::shared_ptr<GroupStreams> streams_;
  const std::vector<at::Tensor> outputs_;
  const UnseenErrors::Flag isRaised_ = std::make_shared<std::atomic<bool>>(false);
  const KernelEnd end_;
};

}  // namespace mooncake
