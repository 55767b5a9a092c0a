#pragma once

#include <map>
#include <span>

#include "base/mutex.h"
#include "device/cuda/cuda_contexts.h"
#include "device/cuda/gdr_copy.h"
#include "device/peer_memory.h"

namespace mooncake {

// Peer memory by the driver's virtual memory management. An allocation is handed over as a file
// descriptor, for which the kernel keeps it; other kinds of handles do not keep it.
class CudaPeerMemory final : public PeerMemory {
 public:
  CudaPeerMemory(CudaContexts& contexts, Result<GdrLibrary> gdr)
      : contexts_(contexts), gdr_(std::move(gdr)) {}

  Status checkSharing(int device) override;
  Result<Allocation> allocateShared(int device, size_t bytes) override;
  Result<std::span<std::byte>> mapShared(const Fd& descriptor, size_t bytes, int device) override;
  Status unmapShared(std::span<std::byte> memory) override;
  Result<std::span<std::byte>> mapForHost(std::span<std::byte> memory) override;
  void unmapForHost(std::span<std::byte> mapped) override { gdr_.unmap(mapped); }
  Result<bool> canAccessPeer(int device, int peer) override;

 private:
  struct Mapping {
    size_t bytes = 0;
    int device = 0;
  };

  const CudaDriver& driver() const { return contexts_.driver(); }
  // These run in a scope of the device's context.
  Result<CUdeviceptr> reserveAndMap(CUmemGenericAllocationHandle handle, size_t bytes, int device);
  Status giveAccess(CUdeviceptr start, size_t bytes, int device);
  Status takeOut(CUdeviceptr start, const Mapping& mapping);
  Result<Allocation> share(CUmemGenericAllocationHandle handle, size_t bytes, int device);

  std::span<std::byte> add(CUdeviceptr start, size_t bytes, int device) EXCLUDES(mutex_);

  // Network cards may also read and write the memory, where the device allows it.
  Result<CUmemAllocationProp> propertiesOf(int device);

  CudaContexts& contexts_;
  GdrCopy gdr_;
  Mutex mutex_;
  std::map<CUdeviceptr, Mapping> mappings_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
