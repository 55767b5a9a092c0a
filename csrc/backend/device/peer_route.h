#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "backend/calls/collective.h"
#include "backend/device/group_streams.h"
#include "backend/device/kernel_calls.h"
#include "backend/device/unseen_errors.h"
#include "base/deadline.h"
#include "base/mutex.h"
#include "peers/peer_collectives.h"

namespace mooncake {

// Does a group's calls with tensors of a device by kernels, if all ranks can. The ranks decide that
// together, in the group's first call that could go so. Thread-safe.
class PeerRoute {
 public:
  using MakeGroup = KernelControl::MakeGroup;
  struct Settings {
    std::string name;  // of the group, for the log
    size_t bytes = 0;  // of inputs that a call exchanges at once
    PeerTable table;
    bool blocks = false;  // wait() waits on the host
    int capacity = 0;     // see BackendOptions
    std::chrono::milliseconds timeout{};
    std::shared_ptr<UnseenErrors> unseen;
    std::function<void(uint64_t active)> onLoss;  // see PeerGuard::Functions
  };
  // `makeGroup`: see KernelControl.
  PeerRoute(MakeGroup makeGroup, Settings settings);

  // Returns null if the call has to be staged, on all ranks. If the caller's stream is recorded into
  // a graph, the operation's kernel is, too; a call that cannot be recorded throws. Throws.
  c10::intrusive_ptr<c10d::Work> run(int rank, const std::shared_ptr<GroupStreams>& streams,
                                     const Collective& call, const KernelRun& kernel,
                                     Deadline deadline);
  // Waits until the kernels of all calls and replays have ended, or for the deadline.
  void drain(Deadline deadline) const EXCLUDES(mutex_);
  // Whether kernels do calls of the group.
  bool hasKernels() const { return started_.load() != nullptr; }
  // Ok, or the error that has ended the kernels' operations. Does not wait.
  Status usable() const;
  // Ends them with this error. Does not wait.
  void fail(const Error& why);

 private:
  void decide(const std::shared_ptr<GroupStreams>& streams, Deadline deadline) REQUIRES(mutex_);
  void checkRecording(const c10::Stream& callers, const Collective& call,
                      const KernelRun& kernel) const REQUIRES(mutex_);
  uint64_t enqueue(int rank, const Collective& call, const KernelRun& kernel,
                   const c10::Stream& stream, Deadline deadline) const REQUIRES(mutex_);
  bool hasPieces(const Collective& call, const KernelRun& kernel) const REQUIRES(mutex_) {
    return peers_->hasPieces(size_t(kernel.count) * call.first().itemsize(), size_t(kernel.parts));
  }

  const MakeGroup makeGroup_;
  const Settings settings_;
  mutable Mutex mutex_;  // also keeps numbers in the stream's order
  const std::shared_ptr<KernelCalls> calls_ GUARDED_BY(mutex_);  // as long as the kernels
  std::shared_ptr<PeerCollectives> peers_ GUARDED_BY(mutex_);    // null: calls are staged
  std::atomic<PeerCollectives*> started_ = nullptr;              // the same, without the lock
};

}  // namespace mooncake
