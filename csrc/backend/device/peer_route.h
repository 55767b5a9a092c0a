#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/device/group_streams.h"
#include "backend/device/unseen_errors.h"
#include "base/deadline.h"
#include "collectives/peer/peer_collectives.h"
#include "group/group.h"

namespace mooncake {

// Does a group's calls with tensors of a device by kernels, if all ranks can. The ranks decide that
// together, in the group's first call that could go so. Thread-safe.
class PeerRoute {
 public:
  // Makes a group of the same ranks, which calls the function with each view. Collective.
  using MakeGroup =
      std::function<std::unique_ptr<Group>(std::function<void(const GroupView&)> onView)>;
  struct Settings {
    std::string name;  // of the group, for the log
    size_t bytes = 0;  // of inputs that a call exchanges at once
    PeerTable table;
    bool blocks = false;  // wait() waits on the host
    int capacity = 0;     // see MooncakeBackend
    std::chrono::milliseconds timeout{};
    std::shared_ptr<UnseenErrors> unseen;
    std::function<void(uint64_t active)> onLoss;  // see PeerGuard::Functions
  };
  PeerRoute(MakeGroup makeGroup, Settings settings)
      : makeGroup_(std::move(makeGroup)), settings_(std::move(settings)) {}

  // One call. `launch` enqueues it; it gets the addresses of contiguous tensors, see
  // PeerCollectives::Tensors.
  struct Call {
    c10d::OpType type;
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;  // may be inputs
    std::vector<at::Tensor> results;  // of the work
    int parts = 1;      // of the inputs of a rank that gives any; the same on all ranks
    int64_t count = 0;  // elements of a part
    int root = -1;      // without this rank the call fails; -1: any may be lost
    std::function<Result<uint64_t>(PeerCollectives&, const PeerCollectives::Tensors&)> launch;
    // Each rank has its own sizes, which may not fit those of the others. `count` is not used.
    bool hasSplits = false;
    // Of a reduction: a factor may belong to it. `name` is that of the call in Python.
    std::optional<c10d::ReduceOp> op = std::nullopt;
    const char* name = "";

    bool isPremultiplied() const { return op && *op == c10d::ReduceOp::PREMUL_SUM; }
    const at::Tensor& first() const { return inputs.empty() ? outputs[0] : inputs[0]; }
  };
  // Returns null if the call has to be staged, on all ranks. If the caller's stream is recorded into
  // a graph, the operation's kernel is, too; a call that cannot be recorded throws. Throws.
  c10::intrusive_ptr<c10d::Work> run(int rank, const std::shared_ptr<GroupStreams>& streams,
                                     const Call& call, Deadline deadline);
  // Waits until the kernels of all calls and replays have ended, or for the deadline.
  void drain(Deadline deadline) const;
  // Ok, or the error that has ended the kernels' operations. Does not wait.
  Status usable() const;
  // Ends them with this error. Does not wait.
  void fail(const Error& why);

 private:
  bool decide(const std::shared_ptr<GroupStreams>& streams, Deadline deadline);
  void checkRecording(const c10::Stream& callers, const Call& call) const;
  uint64_t enqueue(int rank, const Call& call, const c10::Stream& stream) const;
  bool hasPieces(const Call& call) const {
    return peers_->hasPieces(size_t(call.count) * call.first().itemsize(), size_t(call.parts));
  }

  const MakeGroup makeGroup_;
  const Settings settings_;
  mutable std::mutex mutex_;  // guards the fields below, and keeps numbers in the stream's order
  bool isDecided_ = false;
  std::optional<c10::Device> device_;
  std::shared_ptr<PeerCollectives> peers_;           // null: calls are staged
  std::atomic<PeerCollectives*> started_ = nullptr;  // the same, without the lock
};

}  // namespace mooncake
