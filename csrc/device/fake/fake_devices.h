#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/accelerator.h"
#include "device/kernel_launch.h"
#include "device/peer_memory.h"

// Devices for tests. Their memory is memory of the host and each stream is a thread, so work runs
// later than the call that enqueued it, as on an accelerator. No part of a released wheel. In a
// forked child every call returns kAborted, because the streams' threads are not there.
namespace mooncake {

// Makes calls fail on purpose. `call` is the function's name in accelerator.h, peer_memory.h or
// here; it fails from its n-th call on (1: the next one), `times` times.
struct FakeFailure {
  std::string call;
  uint64_t n = 1;
  uint64_t times = 1;
  ErrorCode code = ErrorCode::kSystem;
  // Replaces the failure: the call goes on once this returns. The driver blocks so while a queue of
  // the device is full.
  std::function<void()> block{};
};

// Stand-ins for the kernels of this library.
struct FakeKernels {
  // Does the work of a launch, on the stream's thread. An error loses the devices' context, as an
  // illegal address does on a GPU.
  std::function<Status(DeviceStream, const KernelLaunch&)> run;
  KernelRoom room{.multiprocessors = 4, .blocksEach = 2};  // for every launch
};

class FakeDevices : public Accelerator {
 public:
  // Enqueues any work. The task must not throw, and must not wait for a stream of these devices.
  virtual Status enqueue(DeviceStream stream, std::function<void()> task) = 0;
  // Its handle is null, as in CUDA.
  virtual DeviceStream defaultStream(int device) = 0;
  // All streams of the device that are not destroyed, the default one first.
  virtual std::vector<DeviceStream> streams(int device) = 0;
  // Waits for the work so far of these streams, also of one that is destroyed meanwhile.
  virtual Status synchronizeDevice(int device) = 0;
  virtual bool isIdle(DeviceStream stream) = 0;
  // The priority of createStream(), which the stream's thread does not have.
  virtual StreamPriority priorityOf(DeviceStream stream) = 0;

  // Memory that the other functions take for the device's. Its contents are undefined.
  virtual Result<std::span<std::byte>> allocate(int device, size_t bytes) = 0;
  // Does not wait, like freePinned(). After the streams' work so far, touching the memory is a
  // segmentation fault.
  virtual void free(std::span<std::byte> memory) = 0;

  // Without them launch() and its kin return kUnsupported. Work that is enqueued keeps the old ones.
  virtual void setKernels(FakeKernels kernels) = 0;

  // kInvalidArgument: no function has this name, or it cannot fail.
  virtual Status inject(FakeFailure failure) = 0;
  // The names of all threads that have called functions which can fail, or that free something.
  virtual std::vector<std::string> callers() const = 0;
  // From here on every call returns kSystem, and work that streams hold does not run any more.
  virtual void loseContext() = 0;
  // The bytes of device memory that allocate() and allocateShared() give at most; beyond, they return
  // kExhausted.
  virtual void limitMemory(size_t bytes) = 0;
  // For a call of torch that CUDA forbids during captures: a look at an event, or a wait on the host.
  // If a capture is on and the thread's mode is global, it fails and spoils the captures.
  virtual Status enterUnsafe(const std::string& call) = 0;
  // Whether kernels see bytes of network cards in order: ordersCardWrites(). True at first.
  virtual void setCardWriteOrder(bool isKept) = 0;
  // Calls on the stream are recorded and not run until endCapture(). A stream joins the capture if
  // it blocks on an event that was recorded in it; the stream that began must block on the other
  // streams' last work before endCapture(). Waits on the host and events from outside spoil a
  // capture.
  virtual Status beginCapture(DeviceStream stream) = 0;
  virtual Result<uint64_t> endCapture(DeviceStream stream) = 0;
  // Enqueues the work of a graph, in the order of the calls.
  virtual Status replay(uint64_t graph, DeviceStream stream) = 0;
};

// The fake devices of this process, two of them. A stream has a thread from its first work on. At
// the end of the process, work that has not begun is dropped. The variable FAKE_QUEUES is `queues` of
// makeFakeDevices(), by default 8 as in CUDA.
FakeDevices& fakeDevices();

// Two more, for a test that loses their context, say. The destructor drops work that has not begun
// and waits for the rest. `queues`: number of queues of each device for its streams, see FakeQueue;
// 0: each stream has one.
std::unique_ptr<FakeDevices> makeFakeDevices(size_t queues = 0);

}  // namespace mooncake
