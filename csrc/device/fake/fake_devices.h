#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "device/accelerator.h"

// Devices for tests. Their memory is memory of the host and each stream is a thread, so work runs
// later than the call that enqueued it, as on an accelerator. No part of a released wheel.
namespace mooncake {

// Makes calls fail on purpose. `call` is the function's name in accelerator.h; it fails from its
// n-th call on (1: the next one), `times` times.
struct FakeFailure {
  std::string call;
  uint64_t n = 1;
  uint64_t times = 1;
  ErrorCode code = ErrorCode::kSystem;
};

class FakeDevices : public Accelerator {
 public:
  // Enqueues any work. The task must not throw.
  virtual Status enqueue(DeviceStream stream, std::function<void()> task) = 0;
  virtual DeviceStream defaultStream(int device) = 0;
  // All streams of the device that are not destroyed, the default one first.
  virtual std::vector<DeviceStream> streams(int device) = 0;
  virtual bool isIdle(DeviceStream stream) = 0;

  // Memory that the other functions take for the device's. Its contents are undefined.
  virtual Result<std::span<std::byte>> allocate(int device, size_t bytes) = 0;
  virtual void free(std::span<std::byte> memory) = 0;

  virtual void inject(FakeFailure failure) = 0;
  // From here on every call returns kSystem, and work that streams hold does not run any more.
  virtual void loseContext() = 0;
  // The bytes of device memory that allocate() gives at most; allocate() returns kExhausted beyond.
  virtual void limitMemory(size_t bytes) = 0;
  // Calls on the stream are recorded and not run until endCapture(). replay() enqueues them.
  virtual Status beginCapture(DeviceStream stream) = 0;
  virtual Result<uint64_t> endCapture(DeviceStream stream) = 0;
  virtual Status replay(uint64_t graph, DeviceStream stream) = 0;
};

// The fake devices of this process, two of them. The number of streams' threads is that of the
// streams in use.
FakeDevices& fakeDevices();

}  // namespace mooncake
