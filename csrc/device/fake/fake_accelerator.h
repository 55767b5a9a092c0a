#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fork.h"
#include "base/mutex.h"
#include "device/fake/fake_callers.h"
#include "device/fake/fake_devices.h"
#include "device/fake/fake_failures.h"
#include "device/fake/fake_kernel_table.h"
#include "device/fake/fake_memory.h"
#include "device/fake/fake_streams.h"
#include "device/word_recorder.h"

namespace mooncake {

// Puts memory, streams and injected failures together.
class FakeAccelerator final : public FakeDevices, public PeerMemory, public WordRecorder {
 public:
  explicit FakeAccelerator(size_t queues) : streams_(FakeMemory::kDevices, queues) {}

  const char* name() const override { return "fake"; }
  int deviceCount() const override { return FakeMemory::kDevices; }
  Result<std::string> describe(int device) override;
  Result<MemoryPlace> placeOf(const void* address) override;
  Result<std::span<std::byte>> allocatePinned(size_t bytes) override;
  void freePinned(std::span<std::byte> memory) override;
  Result<DeviceStream> createStream(int device,
                                    StreamPriority priority = StreamPriority::kNormal) override;
  void destroyStream(DeviceStream stream) override;
  Status synchronize(DeviceStream stream) override;
  Result<std::unique_ptr<DeviceEvent>> createEvent(int device) override;
  Status copy(DeviceStream stream, void* to, const void* from, size_t bytes) override;
  bool hasStreamWords(int device) const override;
  Status writeWord(DeviceStream stream, StreamWord* word, uint32_t value) override;
  Status awaitWord(DeviceStream stream, StreamWord* word, uint32_t value) override;
  Status checkRecordedWords(int device) override;
  CaptureMode exchangeCaptureMode(CaptureMode mode) override;
  Result<bool> isCapturing(DeviceStream stream) override;
  Status prepareKernels(int device) override;
  Result<KernelRoom> roomFor(const KernelLaunch& launch, int device) override;
  Status launch(DeviceStream stream, const KernelLaunch& launch) override;
  Result<ExportedMemory> exportMemory(const void* address) override;
  Result<void*> importMemory(const ExportedMemory& memory, int device) override;
  Status closeMemory(void* address) override;
  bool ordersCardWrites(int) const override { return ordersCardWrites_; }
  PeerMemory* peerMemory() override { return this; }

  Status checkSharing(int device) override;
  Result<Allocation> allocateShared(int device, size_t bytes) override;
  Result<std::span<std::byte>> mapShared(const Fd& descriptor, size_t bytes, int device) override;
  Status unmapShared(std::span<std::byte> memory) override;
  Result<std::span<std::byte>> mapForHost(std::span<std::byte> memory) override;
  void unmapForHost(std::span<std::byte>) override {}
  Result<bool> canAccessPeer(int device, int peer) override;

  Status enqueue(DeviceStream stream, std::function<void()> task) override;
  DeviceStream defaultStream(int device) override;
  std::vector<DeviceStream> streams(int device) override;
  Status synchronizeDevice(int device) override;
  bool isIdle(DeviceStream stream) override;
  StreamPriority priorityOf(DeviceStream stream) override;
  Result<std::span<std::byte>> allocate(int device, size_t bytes) override;
  void free(std::span<std::byte> memory) override;
  void setKernels(FakeKernels kernels) override;
  Status inject(FakeFailure failure) override;
  std::vector<std::string> callers() const override { return callers_.names(); }
  void loseContext() override;
  void limitMemory(size_t bytes) override;
  Status enterUnsafe(const std::string& call) override;
  void setCardWriteOrder(bool isKept) override { ordersCardWrites_ = isKept; }
  Status beginCapture(DeviceStream stream) override;
  Result<uint64_t> endCapture(DeviceStream stream) override;
  Status replay(uint64_t graph, DeviceStream stream) override;

  // Ends the streams with the process: later calls fail, and work that runs is awaited until the
  // deadline.
  void end(Deadline deadline);

 private:
  class Event;

  bool isForked() const { return forkGeneration_ != forkGeneration(); }
  // Every function that can fail begins with this.
  Status enter(const char* call) EXCLUDES(mutex_);
  Status checkDevice(const char* call, int device) const;
  Status addWord(const char* call, DeviceStream stream, StreamWord* word, FakeStream::Task&& task);
  // Unmaps the memory once the work that streams hold now is over.
  void retire(const char* call, const void* start, FakeMemory::Origin origin);
  // Later calls fail for this reason.
  void halt(const std::string& reason) EXCLUDES(mutex_);

  const uint32_t forkGeneration_ = forkGeneration();
  FakeMemory memory_;
  FakeFailures failures_;
  FakeCallers callers_;
  FakeKernelTable kernels_;
  std::atomic<bool> ordersCardWrites_{true};

  Mutex mutex_;
  std::string ended_ GUARDED_BY(mutex_);            // the reason why calls fail; empty: none
  std::set<void*> highStreams_ GUARDED_BY(mutex_);  // handles, which no two streams share

  FakeStreams streams_;  // ends first: its work uses the rest
};

}  // namespace mooncake
