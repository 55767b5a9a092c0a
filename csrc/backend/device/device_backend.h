#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backend/device/device_work.h"
#include "backend/device/group_streams.h"
#include "backend/device/message_staging.h"
#include "backend/device/peer_calls.h"
#include "backend/device/peer_route.h"
#include "backend/device/staging.h"
#include "backend/mooncake_backend.h"

namespace mooncake {

class PeerSharing;

// A MooncakeBackend that also takes tensors of devices: each call runs on copies in pinned host
// memory, see Staging. Calls with CPU tensors go to the base as they are.
class DeviceBackend : public MooncakeBackend {
 public:
  using MooncakeBackend::MooncakeBackend;

  // Also logs an error that no call has raised.
  void shutdown() override;
  // Also ends kernels that wait for other ranks.
  void abort() override;

  // Makes the group that shares memory of the device, or returns the one that there is. Collective.
  std::shared_ptr<PeerSharing> peerSharing(const c10::Device& device);
  const std::vector<int>& globalRanks() const { return options().globalRanks; }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override;
  // torch's call for sparse tensors of CUDA devices.
  WorkPtr allreduce_sparse(std::vector<at::Tensor>& tensors,
                           const c10d::AllreduceOptions& opts) override {
    return DeviceBackend::allreduce(tensors, opts);
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                   const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
                        std::vector<int64_t>& inputSplits,
                        const c10d::AllToAllOptions& opts) override;
  // Also waits for the work of the caller's stream: on the device that the options name, else on
  // that of the group's last call with tensors of a device.
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  WorkPtr gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(std::vector<at::Tensor>& outputs,
                         std::vector<std::vector<at::Tensor>>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                              std::vector<at::Tensor>& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr endCoalescing() override;
  // The message goes once the caller's stream has come to the call.
  WorkPtr send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

 private:
  // Null if the first tensor that is defined is the CPU's, or there is none: the base then checks
  // the arguments.
  std::shared_ptr<Staging> stagingFor(at::TensorList tensors, std::chrono::milliseconds timeout);
  std::shared_ptr<Staging> stagingOn(const c10::Device& device, std::chrono::milliseconds timeout);
  // The same for messages. They have streams of their own, because a collective under way may wait on
  // its stream for a rank that waits for a message.
  std::shared_ptr<MessageStaging> messageStagingFor(at::TensorList tensors, int peer, bool isSend);
  // Makes the base's call on the copies.
  template <typename Call>
  WorkPtr staged(const std::shared_ptr<Staging>& staging, std::vector<at::Tensor> outputs,
                 Call&& call, bool onHost = false);
  WorkPtr deviceWork(const std::shared_ptr<Staging>& staging, std::vector<at::Tensor> outputs,
                     WorkPtr host, bool onHost = false);
  DeviceWork::Waiting waiting(bool onHost);
  WorkPtr allreduceSparse(const at::Tensor& tensor, const c10d::AllreduceOptions& opts);
  // `onHost`: wait() needs the end of the receive.
  template <typename Receive>
  WorkPtr receive(std::vector<at::Tensor>& tensors, int from, bool onHost, Receive&& receive);

  std::shared_ptr<GroupStreams> streamsOn(const c10::Device& device);
  // Returns the calls of the group that graphs have, for one more. Throws if it cannot be recorded.
  RecordedCalls& recordedCallsFor(const c10::Stream& callers,
                                  const std::shared_ptr<GroupStreams>& streams);
  static void noteReplay(UnseenErrors& unseen, WorkPtr host);
  // Does the call that `make` returns by a kernel. Null if it has to be staged: on all ranks, see
  // PeerCalls.
  template <typename Make>
  WorkPtr byKernel(std::chrono::milliseconds timeout, Make&& make);
  PeerRoute& route();
  void drainDevice(Deadline deadline) override;
  const std::shared_ptr<UnseenErrors> unseen_ = std::make_shared<UnseenErrors>();
  PeerMessages peerMessages_{options().groupName};
  std::mutex streamsMutex_;  // guards the fields below
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::shared_ptr<GroupStreams>> streams_;
  std::optional<c10::Device> lastDevice_;  // of the last call with tensors of a device
  std::unique_ptr<PeerRoute> route_;       // see route(); once made, it stays
  std::mutex sharingMutex_;                // guards sharing_, also while it is made
  std::shared_ptr<PeerSharing> sharing_;
  std::atomic<PeerSharing*> started_ = nullptr;  // the same, without the lock
};

}  // namespace mooncake
