#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <utility>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "backend/device/group_streams.h"
#include "backend/device/staging.h"
#include "base/mutex.h"

namespace mooncake {

// Returns whether tensors of the device are ones that a Staging copies.
bool isStaged(const c10::Device& device);

// The streams of operations that come one after the other, on each device that they use.
// Thread-safe.
class StagingStreams {
 public:
  // Without settings.words, stagings are HostStaging. `limit`: see Staging::fetch().
  StagingStreams(const StreamSettings& settings, std::chrono::milliseconds limit)
      : settings_(settings), limit_(limit) {}

  // Returns the staging of one operation. Throws.
  std::shared_ptr<Staging> stagingOn(const c10::Device& device);
  c10::Stream streamOn(const c10::Device& device) { return on(device)->collectives(); }

 private:
  std::shared_ptr<GroupStreams> on(const c10::Device& device);

  const StreamSettings settings_;
  const std::chrono::milliseconds limit_;
  Mutex mutex_;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::shared_ptr<GroupStreams>> streams_
      GUARDED_BY(mutex_);
};

}  // namespace mooncake
