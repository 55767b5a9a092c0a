#pragma once

#include <chrono>
#include <cstdint>

#include "backend/device/stream_mark.h"
#include "base/deadline.h"
#include "base/result.h"
#include "peers/peer_guard.h"

namespace mooncake {

// The end of an operation that a kernel does, as its work sees it: on the stream, and on the host.
class KernelEnd {
 public:
  static constexpr std::chrono::microseconds kPause{50};  // between two looks

  // The operation's kernel is the last work on the stream. `number`: of its call. The guard outlives
  // this object.
  KernelEnd(const PeerGuard& guard, uint64_t number, const c10::Stream& stream)
      : guard_(guard), number_(number), mark_(stream) {}

  // The error of a group that ended before the operation did.
  static Status statusOf(const PeerGuard& guard, uint64_t number);

  // Whether there is nothing to wait for, because the kernel or the group has ended.
  bool isOver() const { return !guard_.usable().ok() || mark_.isReached(); }
  // Whether the operation has ended, and the device has its results.
  bool isDone() const { return guard_.hasEnded(number_) && mark_.isReached(); }
  // Makes the current stream wait for the results.
  void block() const { mark_.block(); }
  // Waits on the host until isDone(). Runs signal handlers. Throws the group's error, and kTimeout.
  void await(Deadline deadline) const;

 private:
  const PeerGuard& guard_;
  const uint64_t number_;
  const StreamMark mark_;
};

}  // namespace mooncake
