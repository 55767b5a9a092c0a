#pragma once

#include <map>
#include <memory>

#include "base/mutex.h"
#include "device/accelerator.h"
#include "device/cuda/cuda_contexts.h"
#include "device/cuda/cuda_kernels.h"
#include "device/cuda/cuda_peer_memory.h"
#include "device/cuda/cuda_pinned_pool.h"
#include "device/word_recorder.h"

namespace mooncake {

// NVIDIA's devices, by the functions of a table.
class CudaAccelerator final : public Accelerator, public WordRecorder {
 public:
  // `driver` outlives the accelerator, and so does `kernels`: the fatbin, empty if there is none.
  static Result<std::unique_ptr<CudaAccelerator>> make(const CudaDriver& driver,
                                                       std::span<const std::byte> kernels,
                                                       Result<GdrLibrary> gdr = GdrLibrary::load());

  const char* name() const override { return "cuda"; }
  int deviceCount() const override { return contexts_->count(); }
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
  bool ordersCardWrites(int device) const override;
  PeerMemory* peerMemory() override { return &peers_; }

 private:
  class Event;
  // Memory of another process. The driver maps an allocation once for all imports of it.
  struct Import {
    int device = 0;
    size_t bytes = 0;
    size_t count = 0;
  };
  CudaAccelerator(std::unique_ptr<CudaContexts> contexts, std::span<const std::byte> kernels,
                  Result<GdrLibrary> gdr);

  // Calls the driver with the stream's context. The name of its function is for errors.
  template <typename Call>
  Status run(const char* function, DeviceStream stream, Call call);
  // Calls the driver with the context of a device that the program uses.
  template <typename Call>
  Status runOn(const char* function, int device, Call call);

  Status recordWords(DeviceStream stream, StreamWord* word);

  const std::unique_ptr<CudaContexts> contexts_;
  const CudaDriver& driver_;
  CudaPinnedPool pinned_;
  CudaKernels kernels_;
  CudaPeerMemory peers_;

  Mutex importsMutex_;
  // By the allocation's start in this process.
  std::map<CUdeviceptr, Import> imports_ GUARDED_BY(importsMutex_);
};

}  // namespace mooncake
