#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backend/device/device_work.h"
#include "backend/device/group_streams.h"
#include "backend/device/message_staging.h"
#include "backend/device/peer_route.h"
#include "backend/device/staging.h"
#include "backend/device_half.h"
#include "backend/host_calls.h"
#include "backend/live_group.h"
#include "backend/message_calls.h"
#include "base/mutex.h"

namespace mooncake {

class PeerSharing;
class RecordedCalls;

// Calls with tensors of devices. A call goes by a kernel if it was asked for and all ranks can
// (PeerRoute), a message by memory of the devices (PeerMessages). All other calls run on copies in
// pinned host memory (Staging).
class DeviceCalls final : public DeviceHalf {
 public:
  DeviceCalls(LiveGroup& group, HostCalls& host, MessageCalls& messages)
      : group_(group), host_(host), messages_(messages) {}

  std::optional<WorkPtr> carryOut(const Collective& call) override;
  std::optional<WorkPtr> barrier(const c10d::BarrierOptions& opts) override;
  std::optional<WorkPtr> post(c10d::OpType type, const Tensors& tensors, int peer,
                              int tag) override;
  WorkPtr ofBatch(Coalescing::Batch& batch, WorkPtr host) override;
  std::shared_ptr<PeerSharing> sharing(const c10::Device& device) override;
  Status mayMove() override;
  void drain(Deadline deadline) override;
  void fail(const Error& why) override;
  void left() override;

 private:
  std::shared_ptr<Staging> stagingOn(const c10::Device& device, std::chrono::milliseconds timeout);
  // The same for messages. They have streams of their own, because a collective under way may wait on
  // its stream for a rank that waits for a message.
  std::shared_ptr<MessageStaging> messageStagingFor(const Tensors& tensors, int peer, bool isSend);
  WorkPtr onHost(const Collective& call, const std::shared_ptr<Staging>& staging);
  // Does a call on the copies of its tensors. `waitsOnHost`: wait() needs the end of the call.
  WorkPtr staged(const std::shared_ptr<Staging>& staging, Tensors outputs, Collective host,
                 bool waitsOnHost = false);
  WorkPtr sparse(const Collective& call);
  WorkPtr deviceWork(const std::shared_ptr<Staging>& staging, Tensors outputs, WorkPtr host,
                     bool waitsOnHost = false);
  DeviceWork::Waiting waiting(bool onHost);

  std::shared_ptr<GroupStreams> streamsOn(const c10::Device& device);
  // The calls of the group that graphs have; null: none has any.
  RecordedCalls* recordedCalls() const;
  // Returns them, for one more. Throws if it cannot be recorded.
  RecordedCalls& recordedCallsFor(const c10::Stream& callers,
                                  const std::shared_ptr<GroupStreams>& streams);
  static void noteReplay(UnseenErrors& unseen, WorkPtr host);
  // Null if the call has to be staged: on all ranks, see CollectiveKind::byKernel.
  WorkPtr byKernel(const Collective& call);
  PeerRoute& route();

  LiveGroup& group_;
  HostCalls& host_;
  MessageCalls& messages_;
  const std::shared_ptr<UnseenErrors> unseen_ = std::make_shared<UnseenErrors>();
  PeerMessages peerMessages_{group_.options().groupName};
  Mutex streamsMutex_;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::shared_ptr<GroupStreams>> streams_
      GUARDED_BY(streamsMutex_);
  // Of the last call with tensors of a device.
  std::optional<c10::Device> lastDevice_ GUARDED_BY(streamsMutex_);
  // See route(); once made, it stays.
  std::unique_ptr<PeerRoute> route_ GUARDED_BY(streamsMutex_);
  std::atomic<PeerRoute*> madeRoute_ = nullptr;  // the same, without the lock
  Mutex sharingMutex_;                           // also held while it is made
  std::shared_ptr<PeerSharing> sharing_ GUARDED_BY(sharingMutex_);
  std::atomic<PeerSharing*> started_ = nullptr;  // the same, without the lock
};

}  // namespace mooncake
