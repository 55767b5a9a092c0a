#pragma once

#include <exception>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/device/stream_mark.h"

namespace mooncake {

// An operation that is recorded into a graph of the program. It runs when the graph is replayed, so
// its errors are raised by later calls of the group.
class RecordedWork final : public c10d::Work {
 public:
  // The operation is the last work on `stream`, which belongs to the group and is recorded.
  RecordedWork(int rank, c10d::OpType type, const c10::Stream& stream,
               std::vector<at::Tensor> outputs);

  // It is recorded, and there is nothing else to wait for.
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  // Makes the graph's later work on the current stream wait for the outputs. A capture cannot end
  // without that.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  // Without `override`: c10d::Work has it since torch 2.9 only.
  void blockCurrentStream() { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  // Its callbacks are recorded into the graph, too.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const c10::Stream stream_;
  const std::vector<at::Tensor> outputs_;
  const StreamMark done_;
};

}  // namespace mooncake
