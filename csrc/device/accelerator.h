#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "base/mutex.h"
#include "base/result.h"
#include "device/device_types.h"

// The contract with the accelerators of a process. Knows neither torch nor a vendor's headers.
namespace mooncake {

class PeerMemory;     // device/peer_memory.h
class StreamQueues;   // device/stream_queues.h
struct KernelLaunch;  // device/kernel_launch.h, and KernelRoom
struct KernelRoom;

// Every function, except of names and counts, may return kSystem once the device's context is
// lost, and does so for good; in a forked child it returns kAborted. Thread-safe. Only the threads of
// callers enter it; no function waits for a stream unless its comment says so.
class Accelerator {
 public:
  virtual ~Accelerator() = default;

  virtual const char* name() const = 0;  // "host", "cuda", "fake"
  virtual int deviceCount() const = 0;
  // Returns a line of text about the driver (device -1) or a device, for a person to read.
  virtual Result<std::string> describe(int device) = 0;

  // Returns the kind of the memory, without making a context on any device.
  virtual Result<MemoryPlace> placeOf(const void* address) = 0;
  // Pinned memory that devices of this process can reach at its own address. Slow, and the driver may
  // wait for a device: to be called ahead of work that waits for the caller. freePinned() does not
  // wait: the memory stays valid until the work that streams hold at that moment is over.
  virtual Result<std::span<std::byte>> allocatePinned(size_t bytes) = 0;
  virtual void freePinned(std::span<std::byte> memory) = 0;

  virtual Result<DeviceStream> createStream(int device,
                                            StreamPriority priority = StreamPriority::kNormal) = 0;
  // The streams of a device by their queues. The first call takes some milliseconds.
  Result<StreamQueues*> streamQueues(int device);
  virtual void destroyStream(DeviceStream stream) = 0;  // its work still runs
  // Waits on the host until the stream's work so far is over.
  virtual Status synchronize(DeviceStream stream) = 0;
  virtual Result<std::unique_ptr<DeviceEvent>> createEvent(int device) = 0;

  // Enqueues a copy between any two places. Pageable memory makes it wait on the host.
  virtual Status copy(DeviceStream stream, void* to, const void* from, size_t bytes) = 0;

  // False: streams of the device know no words, and the two functions return kUnsupported.
  virtual bool hasStreamWords(int device) const = 0;
  // Enqueues a store of `value`, which a thread of the host sees after all earlier work.
  virtual Status writeWord(DeviceStream stream, StreamWord* word, uint32_t value) = 0;
  // Enqueues a wait until `word` has reached `value`: int32_t(*word - value) >= 0.
  virtual Status awaitWord(DeviceStream stream, StreamWord* word, uint32_t value) = 0;

  // Sets the calling thread's mode and returns the one before it, kGlobal at first. It counts for
  // torch's calls: calls of this class are as with kRelaxed.
  virtual CaptureMode exchangeCaptureMode(CaptureMode mode) = 0;
  // Whether the stream's calls are recorded into a graph and not run.
  virtual Result<bool> isCapturing(DeviceStream stream) = 0;

  // Loads all kernels of this library on the device. A kernel that is loaded later waits for
  // running kernels, which may wait for it: so this comes ahead of any launch. kUnsupported: this
  // build has no kernels, or none that runs on the device.
  virtual Status prepareKernels(int device) = 0;
  // Returns how many blocks of such a launch run at once on the device.
  virtual Result<KernelRoom> roomFor(const KernelLaunch& launch, int device) = 0;
  // Enqueues a kernel. Pinned memory that it uses must not be freed before it has run. For
  // kInvalidArgument, prepareKernels() has not been called, or the launch exceeds the device's limits.
  virtual Status launch(DeviceStream stream, const KernelLaunch& launch) = 0;

  // kUnsupported if other processes cannot map memory of this kind; the text says why.
  virtual Result<ExportedMemory> exportMemory(const void* address) = 0;
  // Maps memory of another process, for work of `device`, which is one of this process's own: the
  // exporter may number devices otherwise. The address stays valid until closeMemory().
  virtual Result<void*> importMemory(const ExportedMemory& memory, int device) = 0;
  virtual Status closeMemory(void* address) = 0;

  // Returns whether a kernel that runs finds the bytes that a network card has written to the
  // device's memory, once it sees a word that the host wrote after the card had reported them. False
  // if the driver does not know: then a card has to read from that memory in between.
  virtual bool ordersCardWrites(int device) const = 0;

  // Memory that is made to be shared, and that outlives its process. Null: there are no devices.
  virtual PeerMemory* peerMemory() = 0;

 private:
  Mutex queuesMutex_;
  std::map<int, std::shared_ptr<StreamQueues>> queues_ GUARDED_BY(queuesMutex_);
};

}  // namespace mooncake
