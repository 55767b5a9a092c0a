#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

#include "backend/device/group_streams.h"
#include "backend/device/own_stream.h"
#include "backend/device/stream_mark.h"
#include "base/deadline.h"
#include "base/result.h"
#include "group/group.h"
#include "peers/peer_queue.h"

namespace mooncake {

// A group of the ranks for their kernels alone, and the feed that shows its view.
struct KernelControl {
  // Makes a group of the ranks, which calls the function with each view. Collective. Throws.
  using MakeGroup =
      std::function<std::unique_ptr<Group>(std::function<void(const GroupView&)> onView)>;
  static KernelControl make(const MakeGroup& makeGroup);

  std::unique_ptr<Group> group;
  std::shared_ptr<ViewFeed> view;
};

// Decides for a group of ranks whether it has kernels, and for each call whether its kernels run or
// are recorded into a graph. Enqueues them behind the caller's work so far. One thread at a time.
// Functions throw.
class KernelCalls {
 public:
  // Parts of messages.
  struct Names {
    std::string log;
    const char* owner;      // of the kernels
    const char* variable;   // asks for kernels
    const char* setUp;      // remedy if there are no kernels yet in a capture
    const char* oneDevice;  // remedy if tensors are on another device than the kernels' memory
  };
  explicit KernelCalls(Names names) : names_(std::move(names)) {}

  bool isDecided() const { return isDecided_; }
  // The stream of the kernels, as their accelerator knows it. An error: this rank has no kernels, and
  // the other ranks learn of that when theirs are made.
  struct Place {
    Result<Accelerator*> accelerator;
    DeviceStream stream;
  };
  // Begins the decision, for kernels on the stream of collectives.
  Place begin(std::shared_ptr<GroupStreams> streams);
  // Ends the decision, which is the same on all ranks. Returns the kernels; null: there are none. This
  // object outlives them.
  template <typename Peers>
  std::unique_ptr<Peers> end(Result<std::unique_ptr<Peers>> made) {
    if (!made.ok()) {
      warn(made.error());
      return nullptr;
    }
    queue_ = &(*made)->queue();
    return std::move(*made);
  }
  // Whether calls with tensors of the device go by kernels on a stream of their own. Decides that the
  // first time: makes `peers` over `control`, for this many bytes of rows. Collective then.
  template <typename Peers>
  bool takes(const c10::Device& device, std::unique_ptr<Peers>& peers, KernelControl& control,
             size_t bytes, std::chrono::milliseconds timeout) {
    if (!isDecided_) {
      const c10::DeviceGuard on(device);
      auto [accelerator, stream] = begin(device);
      peers =
          end(Peers::make(std::move(control.group), std::move(control.view), std::move(accelerator),
                          stream, bytes, timeout, Deadline::after(timeout)));
    }
    if (peers) checkDevice(device);
    return peers != nullptr;
  }
  // Refuses a stream that is recorded, before the decision.
  void refuseUndecided(const c10::Stream& callers) const;
  // Refuses tensors of another device than the kernels'. After the decision for kernels.
  void checkDevice(const c10::Device& device) const;

  // The stream of the kernels that run.
  const c10::Stream& stream() const { return own_ ? own_->stream() : streams_->collectives(); }
  // The stream of the kernels that run, or of recorded kernels. The latter joins one capture at
  // a time.
  const c10::Stream& stream(bool isRecorded);
  // Whether the capture goes on that the last recorded call was in.
  bool isRecording() const { return recordings_ && recordings_->isCapturing(); }
  // Returns a stream for copies that wait for nothing. For kernels on a stream of their own.
  c10::Stream prompt() const;

  // Enqueues a call on stream(isRecorded), which waits for the work of the caller's stream so far.
  // Returns the result of `enqueue`.
  template <typename Enqueue>
  auto submit(const c10::Stream& callers, bool isRecorded, const Enqueue& enqueue) {
    const c10::Stream& ours = stream(isRecorded);
    std::optional<PeerQueue::Recording> recording;
    if (isRecorded) recording.emplace(*queue_, OwnStream::nativeOf(ours), !isRecording());
    placeBehind(ours, callers);
    try {
      return enqueue(ours);
    } catch (...) {
      if (isRecorded) placeBehind(callers, ours);  // a capture ends with the streams that joined it
      throw;
    }
  }
  // Waits until the kernels of all calls and replays have ended, or for the deadline.
  void drain(Deadline deadline) const;

 private:
  // Begins the decision, for kernels on a stream of their own. Refuses a capture: the kernels are not
  // made in one.
  Place begin(const c10::Device& device);
  void warn(const Error& why) const;

  const Names names_;
  bool isDecided_ = false;
  std::shared_ptr<GroupStreams> streams_;
  // No stream is lent to other users before the kernels have ended.
  std::optional<OwnStream> own_;
  std::optional<OwnStream> recordings_;  // none: nothing was recorded
  PeerQueue* queue_ = nullptr;           // null: there are no kernels
};

}  // namespace mooncake
