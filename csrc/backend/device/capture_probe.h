#pragma once

#include <memory>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "backend/device/own_stream.h"
#include "base/mutex.h"

namespace mooncake {

// Tells whether a stream is being recorded into a graph, where torch does not tell the driver's
// handles of streams (CUDA before torch 2.10). A stream of ours then joins it, and is asked in its
// place: a stream that waits for a recorded one is recorded, too. Thread-safe.
class CaptureProbe {
 public:
  // The probe of a device that an accelerator drives. It lives until the process ends.
  static CaptureProbe& of(const c10::Device& device);

  // Adds nothing to a graph that the stream's calls are recorded into. Throws.
  bool isCapturing(const c10::Stream& stream);

 private:
  // Returns a stream that has joined no capture that goes on.
  const OwnStream& freeStream(const c10::Device& device) REQUIRES(mutex_);

  Mutex mutex_;
  std::vector<std::unique_ptr<OwnStream>> streams_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
