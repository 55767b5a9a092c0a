#pragma once

#include <functional>
#include <memory>
#include <set>

#include "base/mutex.h"
#include "device/fake/fake_devices.h"

namespace mooncake {

// The kernels that a test has given to fake devices. Refuses the launches that CUDA refuses.
// Thread-safe.
class FakeKernelTable {
 public:
  void set(FakeKernels kernels);

  Status prepare(int device);
  Result<KernelRoom> roomFor(const KernelLaunch& launch, int device);
  // Returns the work of a launch. It keeps a copy of the arguments.
  Result<std::function<Status()>> bind(DeviceStream stream, const KernelLaunch& launch);

 private:
  static constexpr uint32_t kMostThreads = 1024;  // of a block

  Status checkSet() const REQUIRES(mutex_);
  Status checkPrepared(const KernelLaunch& launch, int device) const REQUIRES(mutex_);

  Mutex mutex_;
  std::shared_ptr<const FakeKernels> kernels_ GUARDED_BY(mutex_);
  std::set<int> prepared_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
