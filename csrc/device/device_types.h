#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/result.h"

// The memory, streams and events of devices, as device/accelerator.h has them.
namespace mooncake {

enum class MemoryKind : uint8_t {
  kHost,    // pageable
  kPinned,  // host memory that devices copy from and to asynchronously
  kDevice,
};

struct MemoryPlace {
  MemoryKind kind = MemoryKind::kHost;
  int device = -1;  // the owner of kDevice memory
};

// A stream of the program or of this library. `handle` is the vendor's: a CUstream, for example. A
// stream of the program outlives the pinned memory that calls on it use.
struct DeviceStream {
  int device = 0;
  void* handle = nullptr;
};

// What a thread may ask of the driver while another thread captures a graph: cudaStreamCaptureMode.
enum class CaptureMode : uint8_t {
  kGlobal,       // no call that could disturb any capture, such as a look at an event
  kThreadLocal,  // no call that could disturb a capture of this thread
  kRelaxed,      // any call
};

// On a device that has priorities, blocks of kernels on a high stream run before waiting blocks of
// kernels on a normal one.
enum class StreamPriority : uint8_t { kNormal, kHigh };

// A word in pinned memory that a stream and the host share. It counts upwards and may wrap.
using StreamWord = std::atomic<uint32_t>;

class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual Status record(DeviceStream stream) = 0;
  // Makes the stream wait for the last record() before this call. The host does not wait.
  virtual Status block(DeviceStream stream) = 0;
  virtual Result<bool> hasHappened() = 0;
};

// Memory of a device that other processes of the host may map.
struct ExportedMemory {
  std::string handle;       // opaque bytes of the vendor's, at most 64
  uint64_t allocation = 0;  // its number: two allocations of a process may have one handle
  uint64_t offset = 0;      // of the address within the exported allocation
  uint64_t bytes = 0;       // from the address to the allocation's end
  // True: memory of PeerMemory. `handle` comes from DescriptorOffers, and `allocation` is the
  // number of the offer. The accelerator does not take it.
  bool isOffered = false;
};

}  // namespace mooncake
