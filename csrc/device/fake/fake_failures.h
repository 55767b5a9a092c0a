#pragma once

#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "device/fake/fake_devices.h"

namespace mooncake {

// The failures that a test has injected. Thread-safe.
class FakeFailures {
 public:
  // kInvalidArgument if no function that can fail has this name.
  Status add(FakeFailure failure);
  // Counts a call, blocks as long as it has to, and returns the error that it has to return.
  Status count(std::string_view call);

 private:
  Mutex mutex_;
  std::vector<FakeFailure> failures_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
