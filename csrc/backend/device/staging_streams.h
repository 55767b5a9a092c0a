#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "backend/device/staging.h"
#include "backend/device/stream_words.h"

namespace mooncake {

// Returns whether tensors of the device are ones that a Staging copies.
bool isStaged(const c10::Device& device);

// One stream of torch's pool on each device, for the copies of operations that come one after the
// other. Thread-safe.
class StagingStreams {
 public:
  // `usesWords`: stagings are StreamStaging, else HostStaging. `limit`: see Staging::fetch().
  StagingStreams(bool usesWords, std::chrono::milliseconds limit)
      : usesWords_(usesWords), limit_(limit) {}

  // Returns the staging of one operation. Throws if its streams must know words and do not.
  std::shared_ptr<Staging> stagingOn(const c10::Device& device);
  c10::Stream streamOn(const c10::Device& device) { return on(device).stream; }

 private:
  struct Entry {
    c10::Stream stream;
    std::shared_ptr<StreamWords> words;  // null: HostStaging
  };
  const Entry& on(const c10::Device& device);

  const bool usesWords_;
  const std::chrono::milliseconds limit_;
  std::mutex mutex_;  // guards entries_
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, Entry> entries_;
};

}  // namespace mooncake
