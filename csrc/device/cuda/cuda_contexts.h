#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/cuda/cuda_driver.h"

namespace mooncake {

// The devices of the driver with their primary contexts, which PyTorch uses, too. A context costs
// hundreds of MiB of its device, so none is made on a device that the program did not choose.
// Thread-safe.
class CudaContexts {
 public:
  // Initialises the driver. `driver` outlives the object.
  static Result<std::unique_ptr<CudaContexts>> make(const CudaDriver& driver);

  const CudaDriver& driver() const { return driver_; }
  // Not checked: the number of devices is fixed.
  int count() const NOT_CHECKED { return static_cast<int>(devices_.size()); }
  bool isForked() const { return forkGeneration_ != forkGeneration(); }
  // kAborted in a forked child.
  Status checkProcess() const;

  // The context of a device that the program chose, with a stream of it for example. Makes the
  // context if there is none. kSystem if it is lost.
  Result<CUcontext> chosen(int device);
  // The context of a device that the program uses already; otherwise kInvalidArgument.
  Result<CUcontext> inUse(int device);
  // Returns the device of the thread's current context, else the first one with a context.
  Result<int> anyInUse();

  // Both make no context.
  Result<CUdevice> handleOf(int device);
  Result<int> attribute(CUdevice_attribute attribute, int device);

  // Returns the error of a call to the driver. A lost context is remembered, and logged once.
  // `device` is -1 if the call was for none.
  Status check(const char* function, int device, CUresult result);

 private:
  struct Device {
    CUdevice handle = 0;
    CUcontext context = nullptr;  // retained for good; null: not yet
    std::string lost;             // the error that lost the context; empty: none
  };
  explicit CudaContexts(const CudaDriver& driver) : driver_(driver) {}
  Status find() REQUIRES(mutex_);
  Status checkUsable(int device) const REQUIRES(mutex_);
  Result<bool> isActive(int device) const REQUIRES(mutex_);
  Result<CUcontext> retain(int device) REQUIRES(mutex_);
  Status failed(const char* function, int device, CUresult result) const;

  const CudaDriver& driver_;
  const uint32_t forkGeneration_ = forkGeneration();
  Mutex mutex_;
  std::vector<Device> devices_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
