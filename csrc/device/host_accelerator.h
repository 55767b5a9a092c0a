#pragma once

#include "device/accelerator.h"
#include "device/kernel_launch.h"
#include "device/peer_memory.h"

namespace mooncake {

// A machine without devices. A copy is a memcpy() before the call returns, on any stream; functions
// that need a device return kUnsupported. Works in forked children, too.
class HostAccelerator final : public Accelerator {
 public:
  const char* name() const override { return "host"; }
  int deviceCount() const override { return 0; }
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
  CaptureMode exchangeCaptureMode(CaptureMode) override { return CaptureMode::kGlobal; }
  Result<bool> isCapturing(DeviceStream stream) override;
  Status prepareKernels(int device) override;
  Result<KernelRoom> roomFor(const KernelLaunch& launch, int device) override;
  Status launch(DeviceStream stream, const KernelLaunch& launch) override;
  Result<ExportedMemory> exportMemory(const void* address) override;
  Result<void*> importMemory(const ExportedMemory& memory, int device) override;
  Status closeMemory(void* address) override;
  bool ordersCardWrites(int) const override { return true; }
  PeerMemory* peerMemory() override { return nullptr; }
};

}  // namespace mooncake
