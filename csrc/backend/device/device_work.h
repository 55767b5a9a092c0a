#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
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
    std::shared_ptr<UnseenErrors> unseen;  // learns of an operation that wait() leaves under way
    UnseenErrors::Unseen earlier;          // of another one; wait() raises it if nobody has
    bool onHost = false;                   // the caller needs the end of the operation
    bool blocks = false;                   // on the host, until the outputs are there
    std::chrono::milliseconds limit{0};    // of a wait() that has no timeout, for the outputs
  };

  DeviceWork(int rank, c10d::OpType type, WorkPtr host,
             std::vector<std::shared_ptr<Staging>> stagings, std::vector<at::Tensor> outputs,
             Waiting waiting);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Makes the current stream of the device wait for the outputs. Raises the error of an operation
  // that has already failed. Waits on the host for the end of the operation if the streams know no
  // words, and if it was made so. Only then `timeout` counts.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  // Without `override`: c10d::Work has it since torch 2.9 only.
  void blockCurrentStream() { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override { return host_->sourceRank(); }
  uint64_t getSequencenumber() const override { return host_->getSequencenumber(); }
  // Its callbacks run on streams that wait for the outputs. It raises the error of an earlier
  // operation that nobody has raised. If wait() blocks, it is complete when the operation has ended,
  // and has the operation's error.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // False: wait() is through at once, and the streams wait.
  bool hasOutputs() const;
  bool waitsOnHost() const;
  // True: futures are complete at once, and the streams wait.
  bool hasFuturesAtOnce() const { return !waitsOnHost() && isOrdered() && !waiting_.blocks; }
  // True: the outputs come in the order of the calls.
  bool isOrdered() const;

  // Waits on the host for the end of the operation. Its outputs may still be on their way.
  void awaitVerdict() const;
  const WorkPtr& host() const { return host_; }

 private:
  // Returns the error that waiting_.earlier has for this operation to raise; null: none.
  std::exception_ptr takeEarlier();
  void awaitHost(std::chrono::milliseconds timeout);
  void block() const;
  void awaitOutputs(Deadline deadline) const;
  // Reports an error that comes after wait() has returned to later calls.
  void watchError();

  const WorkPtr host_;
  const std::vector<std::shared_ptr<Staging>> stagings_;
  const std::vector<at::Tensor> outputs_;
  const Waiting waiting_;
  const UnseenErrors::Flag isRaised_ = std::make_shared<std::atomic<bool>>(false);
  std::once_flag watched_;
};

}  // namespace mooncake
