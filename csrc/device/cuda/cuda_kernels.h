#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <span>

#include "base/mutex.h"
#include "device/accelerator.h"
#include "device/cuda/cuda_contexts.h"
#include "device/kernel_launch.h"
#include "kernels/kernel_id.h"

namespace mooncake {

// The kernels of this library on CUDA devices: loads them from a fatbin, and launches them.
// Thread-safe.
class CudaKernels {
 public:
  // `image` is the fatbin, and outlives the object. Empty: there are no kernels.
  CudaKernels(CudaContexts& contexts, std::span<const std::byte> image)
      : contexts_(contexts), image_(image) {}

  // Accelerator's functions of the same names.
  Status prepare(int device);
  Result<KernelRoom> roomFor(const KernelLaunch& launch, int device);
  Status launch(DeviceStream stream, const KernelLaunch& launch);

 private:
  using Functions = std::array<CUfunction, kKernelCount>;

  Status checkImage() const;
  Status loadLibrary(int device) REQUIRES(loadMutex_);
  Result<Functions> loadAll(int device) REQUIRES(loadMutex_);
  // Lets the kernel have as much dynamic shared memory as the device gives a block.
  Status raiseSharedLimit(CUfunction function, int device);

  Result<CUfunction> find(KernelId kernel, int device) EXCLUDES(mutex_);

  CudaContexts& contexts_;
  const std::span<const std::byte> image_;
  // Loading may wait for kernels that run. A launch that they wait for needs the second lock alone.
  Mutex loadMutex_;
  CUlibrary library_ GUARDED_BY(loadMutex_) = nullptr;  // stays loaded
  Mutex mutex_;
  std::map<int, Functions> loaded_ GUARDED_BY(mutex_);  // by device; complete
};

}  // namespace mooncake
