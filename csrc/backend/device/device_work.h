#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/callbacks.h"
#include "backend/device/staging.h"
#include "backend/device/unseen_errors.h"

namespace mooncake {

class Completions;

// An operation on tensors of a device. `host`: the operation on their copies in host memory; a
// batch of calls has a staging for each call with such tensors.
// `isRaised`: the flag of UnseenErrors, or null.
class DeviceWork : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  DeviceWork(int rank, c10d::OpType type, WorkPtr host,
             std::vector<std::shared_ptr<Staging>> stagings, std::vector<at::Tensor> outputs,
             UnseenErrors::Flag isRaised);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Makes the current stream of the device wait for the outputs. Raises the error of an operation
  // that has already failed. Waits on the host for the end of the operation if the streams know no
  // words, and for messages and barriers. Only then `timeout` counts.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override { return host_->sourceRank(); }
  uint64_t getSequencenumber() const override { return host_->getSequencenumber(); }
  // Its callbacks run on streams that wait for the outputs.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  const WorkPtr& host() const { return host_; }

 private:
  bool waitsOnHost() const;
  void block() const;

  const WorkPtr host_;
  const std::vector<std::shared_ptr<Staging>> stagings_;
  const std::vector<at::Tensor> outputs_;
  const UnseenErrors::Flag isRaised_;
};

}  // namespace mooncake
