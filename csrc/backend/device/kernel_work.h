#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/device/group_streams.h"
#include "base/deadline.h"
#include "collectives/peer/peer_collectives.h"

namespace mooncake {

// An operation that a kernel does. Its error is raised by wait(), if it is known by then, and else
// by later calls of the group.
class KernelWork final : public c10d::Work {
 public:
  // The kernel is the last work on the stream of `streams` for collectives.
  KernelWork(int rank, c10d::OpType type, std::shared_ptr<PeerCollectives> peers, uint64_t number,
             std::shared_ptr<GroupStreams> streams, std::vector<at::Tensor> outputs,
             bool blocksHost);
  ~KernelWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Makes the current stream of the device wait for the outputs. Waits on the host for barriers, and
  // if it was made so. Only then `timeout` counts.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  // Complete at once. Its callbacks run on a stream that waits for the outputs.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void block() const;
  void awaitOnHost(Deadline deadline) const;

  const std::shared_ptr<PeerCollectives> peers_;
  const uint64_t number_;
  const std::shared_ptr<GroupStreams> streams_;
  const std::vector<at::Tensor> outputs_;
  const bool blocksHost_;
  std::optional<c10::Event> done_;
};

}  // namespace mooncake
