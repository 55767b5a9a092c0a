#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "base/fork.h"
#include "device/accelerator.h"
#include "device/stream_queues.h"

namespace mooncake {

// A stream for one owner at a time. When the owner goes and its work is over, the next one has it. It
// is never destroyed: torch's allocators remember the streams that have used
// their memory.
class OwnStream {
 public:
  // Throws if the device has no more of them, or its context is lost. Without words of streams, the
  // role does not count. Without an accelerator for the device, it is a stream of torch's pool, where
  // other owners may have it too.
  explicit OwnStream(const c10::Device& device, StreamRole role = StreamRole::kRecords);
  // The same, but not in the queue of a stream of the program, which is in no capture.
  OwnStream(const c10::Device& device, StreamRole role, const c10::Stream& programs);
  // Owns a stream that was taken from the queues of the device.
  OwnStream(const c10::Device& device, const DeviceStream& taken);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  const c10::Stream& stream() const { return stream_; }
  // Both are null if torch alone drives the device.
  StreamQueues* queues() const { return queues_; }
  Accelerator* accelerator() const { return accelerator_; }
  DeviceStream native() const { return nativeOf(stream_); }
  // Whether work on the stream is recorded into a graph. Throws the accelerator's errors.
  bool isCapturing() const { return isCapturing(stream_); }

  // Returns the accelerator's name of a stream that an owner with an accelerator has.
  static DeviceStream nativeOf(const c10::Stream& stream);
  // The same of such a stream. False without an accelerator.
  static bool isCapturing(const c10::Stream& stream);
  // Returns torch's name of a stream that torch did not make.
  static c10::Stream named(const c10::Device& device, const DeviceStream& stream);

 private:
  Accelerator* const accelerator_;
  StreamQueues* const queues_;
  const c10::Stream stream_;
  const uint32_t forkGeneration_ = forkGeneration();
};

}  // namespace mooncake
