#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/callbacks.h"
#include "backend/device/staging.h"
#include "backend/device/unseen_errors.h"
#include "base/deadline.h"

namespace mooncake {

class Completions;

// An operation on tensors of a device. `host`: the operation on their copies in host memory; a
// batch of calls has a staging for each call with such tensors.
class DeviceWork : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // How wait() ends.
  struct Waiting {
    UnseenErrors::Flag isRaised;   // of this operation, or null
    UnseenErrors::Unseen earlier;  // of another one; wait() raises it if nobody has
    bool blocks = false;           // on the host, until the outputs are there
  };

  DeviceWork(int rank, c10d::OpType type, WorkPtr host,
             std::vector<std::shared_ptr<Staging>> stagings, std::vector<at::Tensor> outputs,
             Waiting waiting);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Makes the current stream of the device wait for the outputs. Raises the error of an operation
  // that has already failed. Waits on the host for the end of the operation if the streams know no
  // words, for messages, batches and barriers, and if it was made so. Only then `timeout` counts.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override { return host_->sourceRank(); }
  uint64_t getSequencenumber() const override { return host_->getSequencenumber(); }
  // Its callbacks run on streams that wait for the outputs. It raises the error of an earlier
  // operation that nobody has raised.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // False: wait() and the future are through at once, and the streams wait.
  bool waitsOnHost() const;

  const WorkPtr& host() const { return host_; }

 private:
  // Returns the error that waiting_.earlier has for this operation to raise; null: none.
  std::exception_ptr takeEarlier();
  void awaitHost(std::chrono::milliseconds timeout);
  void block() const;
  void awaitOutputs(Deadline deadline) const;

  const WorkPtr host_;
  const std::vector<std::shared_ptr<Staging>> stagings_;
  const std::vector<at::Tensor> outputs_;
  const Waiting waiting_;
};

}  // namespace mooncake
